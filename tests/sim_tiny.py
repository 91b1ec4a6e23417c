"""A workload of a few seconds, for tests of the simulator."""

TINY = """
name = "tiny"
[run]
ranks = 8
profile = "h100-qwen2.5-7b"
groups_per_step = 4
group_size = 4
max_lag = 2
[[kind]]
name = "a"
turns = [[0, 2], [50, 4], [100, 9]]
prompt = 200
observation = [[0, 50], [100, 300]]
output = [[0, 20], [100, 150]]
[[kind.tool]]
name = "t"
latency_s = [[0, 0.1], [50, 0.4], [100, 6.0]]
"""
