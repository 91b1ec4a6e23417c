"""What a worker says about groups and members, as pure functions of config and records."""

from actors.rollout import Member
from cluster.config import Config
from cluster.messages import EvalEpisode
from cluster.types import End, EndKind, Order


def group_deadline_s(config: Config) -> float:
    """Seconds that a group may take: what its own limits allow at worst, within the run's patience.

    Half of ``run.deadline_s`` at most, so that a stuck group is given up before the run is.
    """
    env, generator = config.env, config.generator
    answer = generator.request_timeout_s * (2 if config.admission.policy == "task" else 1)  # gate, engine
    turn = answer * (generator.max_retries + 1) + env.step_timeout_s
    turn += 20 * env.latency.get("mean_s", 0.0)
    return min(env.start_timeout_s + env.max_turns * turn, config.run.deadline_s / 2)


def never_started(order: Order, trajectory: str) -> End:
    """End of a member that waited for a slot until the group's deadline."""
    return End(
        trajectory=trajectory,
        group=order.group,
        attempt=order.attempt,
        kind=EndKind.ABANDONED,
        turns=0,
        reason="deadline",
        detail="no slot became free",
    )


def eval_episode(order: Order, member: Member, end: End) -> EvalEpisode:
    """What the controller keeps of an evaluated trajectory."""
    calls = [call for turn in member.turns for call in turn.calls]
    spans = [span.version for call in calls for span in call.versions]
    failed = end.kind in (EndKind.FAILED, EndKind.ABANDONED)
    return EvalEpisode(
        suite=order.suite,
        group=order.group,
        success=end.rewards.get("success", 0.0),
        rewards=end.rewards,
        turns=end.turns,
        tokens=sum(len(call.output) // 4 for call in calls),
        error=f"{end.kind}({end.reason}): {end.detail}" if failed else "",
        versions=(min(spans), max(spans)) if spans else (0, 0),
    )
