"""The register of rules between fields.

A rule runs when all the values it needs are known, so a wrong field hides only the
rules that depend on it.
"""

from collections.abc import Callable

from mpipar.config.values import Values

Check = Callable[..., str | None]

_RULES: list[tuple[tuple[str, ...], Check]] = []


def violated(values: Values) -> list[str]:
    """One sentence for every violated rule whose values are known."""
    found = []
    for needs, check in _RULES:
        if all(key in values for key in needs):
            found.append(check(values, *(values[key] for key in needs)))
    return [sentence for sentence in found if sentence]


def rule(*needs: str) -> Callable[[Check], Check]:
    """Register a rule: called with the values, then with those of the named keys."""

    def register(check: Check) -> Check:
        _RULES.append((needs, check))
        return check

    return register
