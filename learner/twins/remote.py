"""Ray classes of the timed twins of learner ranks and scorers (learner/twin.py, learner/scorer_twin.py)."""

import ray

from learner.scorer_twin import ScorerTwin
from learner.twin import LearnerTwin

RemoteLearnerTwin = ray.remote(LearnerTwin)
RemoteScorerTwin = ray.remote(ScorerTwin)
