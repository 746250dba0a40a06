"""How the requests of one scheduler speculate, and the results of their drafts. Pure."""

from dataclasses import dataclass, field

from stageline_runtime.speculation.step_cost import StepCost

SMOOTHING = 0.1
"""Weight of the newest draft step's time in what a draft step is thought to take."""


@dataclass(slots=True)
class DraftCounts:
    """Results of all drafts of a scheduler, since its start."""

    drafted: int = 0
    held: int = 0
    rows: int = 0
    held_at: list[int] = field(default_factory=list)
    """By place in its row, from 0."""

    def note_row(self, num_drafts: int, num_held: int) -> None:
        self.drafted += num_drafts
        self.rows += 1
        self.held += num_held
        self.held_at += [0] * (num_held - len(self.held_at))
        for place in range(num_held):
            self.held_at[place] += 1


@dataclass(slots=True)
class DraftSettings:
    """What requests draft by. The costs are measured at warm-up."""

    tokens: int
    """Most drafts of a row."""
    min_match: int
    """Fewest tokens that lookup must have seen before."""
    cost: StepCost
    counts: DraftCounts = field(default_factory=DraftCounts)
    draft_step_seconds: float = 0.0
    """What one step of the draft model takes on the last stage."""

    draft_context_tokens: int = 0
    """How far into a request the draft model can go."""

    def note_draft_step(self, seconds: float) -> None:
        """The last stage has drafted: its steps took so long, on the average; 0: it can't tell."""
        if seconds > 0.0:
            known = self.draft_step_seconds or seconds
            self.draft_step_seconds = known + SMOOTHING * (seconds - known)
