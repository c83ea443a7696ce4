"""Distributed plans by search over sharding, copies and cuts; a reconstruction of Auto-MAP.

Wang et al., Auto-MAP: A DQN framework for exploring distributed execution plans for DNN workloads,
2020 (arXiv 2007.04069), says that a DQN with pruning by linkage groups searches operator partition,
data parallelism and pipelines; states, actions, rewards and ends are not in what is public of it.
Those here are a reconstruction, and the exact peers beside them are not from the paper.
"""
