"""Learning rate over inner steps: a linear rise, then constant."""


def warmup(num_steps_done: int, warmup_steps: int) -> float:
    """Factor in (0, 1] for the step that follows `num_steps_done`, counted over the optimizer state's own life.

    A miner that joins with an empty optimizer state warms up too.
    """
    return min(1.0, (num_steps_done + 1) / (warmup_steps + 1))
