"""What a run may still spend at a site."""

from collections import Counter
from collections.abc import Callable

from flower_desloc.core.errors import SiteRefusedError
from flower_desloc.privacy.accounting import Budget, Step, epsilon
from flower_desloc.privacy.ledger import Ledger

_PRECISION = 1.01
"""How far the noise multiplier may be above the least that fits."""
_MOST_NOISE = 128.0
"""A budget that needs more is as good as spent: nothing would be learned."""
_BLOCK = 32
"""Steps for which the budget is checked at once near its end: an epsilon takes a second."""


MOST_STEPS = 100_000
"""Steps that a budget is accounted for: with a usual budget it takes a core about a minute to find
their noise, and two gigabytes; with a million it takes several."""


class BudgetSpentError(SiteRefusedError):
    """A site's privacy budget does not suffice for a step."""


class Account:
    """The account of one run in a site's ledger.

    Parameters
    ----------
    ledger : Ledger
        What was spent.
    run : str
        Name of the run, the same after a resume.
    num_steps : int
        Steps that the run is to take.
    of_run, of_site : Budget, optional
        The most that this run may spend, and that all runs may spend together. At least one.

    """

    def __init__(
        self,
        ledger: Ledger,
        run: str,
        num_steps: int,
        *,
        of_run: Budget | None = None,
        of_site: Budget | None = None,
    ) -> None:
        self._ledger, self._run, self._num_steps = ledger, run, num_steps
        # A site's budget is for all that the ledger has, whatever the run.
        budgets: dict[str | None, Budget | None] = {run: of_run, None: of_site}
        self._budgets = {of: budget for of, budget in budgets.items() if budget is not None}
        if not self._budgets:
            raise ValueError("differential privacy needs a budget, of the run or of the site")
        self._noise: dict[float, float] = {}

    @property
    def secret(self) -> bytes:
        """The site's secret: 32 random bytes that never leave it."""
        return self._ledger.secret

    def noise_multiplier(self, sample_rate: float) -> float:
        """Return the noise multiplier of the run, which is decided before its first step.

        It is about the least with which all steps of the run fit into what is left. Raises
        ``BudgetSpentError`` if there is none. The ledger is free for other runs meanwhile.
        """
        with self._ledger.locked():
            stated = self._ledger.noise_multiplier(self._run)
            taken = {of: self._ledger.steps(of) for of in self._budgets}
        if stated is not None:
            return stated
        if sample_rate in self._noise:
            return self._noise[sample_rate]
        self._require_few(max(steps.total() for steps in taken.values()) + self._num_steps)

        def fits(noise: float) -> bool:
            planned = Counter({Step(noise, sample_rate): self._num_steps})
            return all(budget.allows(taken[of] + planned) for of, budget in self._budgets.items())

        found = _least(fits) or self._refuse(sample_rate)
        with self._ledger.locked():
            begun = self._ledger.noise_multiplier(self._run)  # by another process meanwhile
        return begun or self._noise.setdefault(sample_rate, found)

    def require_left(self, query: str, step: Step) -> None:
        """Raise ``BudgetSpentError`` if what is left does not suffice for a query.

        One in the ledger needs nothing.
        """
        with self._ledger.locked():
            is_known = self._ledger.answer(query) is not None
        if not is_known:
            self._require_left(step)  # the accountant may take long, and remembers what it found

    def charge(self, query: str, answer: str, step: Step) -> bool:
        """Enter a query and its answer into the ledger, unless it is there.

        Returns False if it is there with another answer, which then must not be given. Raises
        ``BudgetSpentError`` if what is left does not suffice.
        """
        self.require_left(query, step)
        with self._ledger.locked():
            given = self._ledger.answer(query)
            if given is None:
                self._require_left(step)
                self._ledger.append(self._run, query, answer, step)
        return given in (None, answer)

    def spent(self) -> dict[str, float]:
        """Return the steps that the run has taken so far, and their epsilon with its delta.

        The delta is the site's, if it has a budget. The steps of one run are alike, so this takes a
        moment; those of twenty runs together could take the accountant twenty seconds.
        """
        budget = self._budgets.get(None) or self._budgets[self._run]
        steps, delta = self._ledger.steps(self._run), budget.delta
        return {"steps": steps.total(), "epsilon": epsilon(steps, delta), "delta": delta}

    def _require_left(self, step: Step) -> None:
        """Raise ``SiteRefusedError`` if what is left does not suffice for a step."""
        planned = max(self._num_steps - self._ledger.steps(self._run).total(), 1)
        for of, budget in self._budgets.items():
            taken = self._ledger.steps(of)
            self._require_few(taken.total() + 1)
            block = _BLOCK - taken[step] % _BLOCK
            tried = (n for n in (planned, block, 1) if taken.total() + n <= MOST_STEPS)
            if not any(budget.allows(taken + Counter({step: n})) for n in tried):
                raise self._spent(of)

    def _require_few(self, number: int) -> None:
        if number > MOST_STEPS:
            raise SiteRefusedError(
                f"this site accounts for at most {MOST_STEPS} steps with differential privacy, of "
                f"all runs together if its node config has epsilon; run.steps={self._num_steps} is "
                "too many",
                f"they would be {number}",
            )

    def _refuse(self, sample_rate: float) -> float:
        planned = Counter({Step(_MOST_NOISE, sample_rate): self._num_steps})
        raise self._spent(
            next(
                of
                for of, budget in self._budgets.items()
                if not budget.allows(self._ledger.steps(of) + planned)
            )
        )

    def _spent(self, of: str | None) -> BudgetSpentError:
        budget, steps = self._budgets[of], self._ledger.steps(of)
        whose, setting = "site", "epsilon in its node config"
        if of is not None:
            whose, setting = "site in this run", "privacy.epsilon"
        return BudgetSpentError(
            f"the privacy budget of this {whose}, {budget}, is spent: the rest is too little for "
            f"more; it takes no further step, unless {setting} is raised",
            f"{steps.total()} steps took epsilon={epsilon(steps, budget.delta):.4g}",
        )


def _least(fits: Callable[[float], bool]) -> float | None:
    """Return about the least noise multiplier that ``fits``; None if not even a huge one does."""
    high = 1.0
    while not fits(high):
        high *= 2
        if high > _MOST_NOISE:
            return None
    low = high / 2
    while high <= 1 and low >= 0.25 and fits(low):  # below, the accountant needs gigabytes
        high, low = low, low / 2
    while high > low * _PRECISION:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
