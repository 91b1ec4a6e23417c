"""Ray classes of the timed twins of learner ranks and scorers (learner/twin.py)."""

import ray

from learner.twin import LearnerTwin, ScorerTwin

RemoteLearnerTwin = ray.remote(LearnerTwin)
RemoteScorerTwin = ray.remote(ScorerTwin)
