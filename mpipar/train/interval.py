"""How often it pays to save."""

import math


def best_interval(save_s: float, failure_s: float) -> float:
    """Seconds of work between saves that lose the least time.

    save_s     how long a save keeps the run waiting
    failure_s  mean time between failures of the whole job
    Source     Daly 2006 (A higher order estimate of the optimum checkpoint interval),
               equation 37; its first term is Young's of 1974
    """
    if save_s >= 2 * failure_s:
        return failure_s
    ratio = save_s / (2 * failure_s)
    young = math.sqrt(2 * save_s * failure_s)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s
