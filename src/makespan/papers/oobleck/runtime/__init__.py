"""Training that survives the loss of nodes: coordinator, nodes, and what they say to each other."""

__all__: list[str] = []
