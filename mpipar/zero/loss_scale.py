"""What the loss is multiplied by, so that small gradients do not vanish in fp16."""

GROWTH, BACKOFF = 2.0, 0.5


class LossScale:
    """Dynamic loss scaling: halved when a gradient overflows, doubled after a while.

    The step of an overflow is skipped. All ranks see the same steps succeed and fail,
    so that they have the same scale.

    value    the factor
    good     good steps in a row so far
    window   good steps in a row after which it is doubled; 0 = it never changes
    Source   Micikevicius et al. 2018, section 3.2
    """

    def __init__(self, value: float = 1.0, window: int = 0) -> None:
        self.value, self.window, self.good = value, window, 0

    @property
    def is_fixed(self) -> bool:
        """True where it never changes."""
        return self.window == 0

    def note(self, *, good: bool) -> None:
        """A step succeeded, or its gradients were not finite."""
        if self.is_fixed:
            return
        self.good = self.good + 1 if good else 0
        if not good:
            self.value = max(1.0, self.value * BACKOFF)
        elif self.good == self.window:
            self.value, self.good = self.value * GROWTH, 0
