"""Who stands in the paper's tables. They are entrants of `ring`; here is in which order, and what each adds."""

from dataclasses import dataclass

# Of its Tables 1 and 2 and its Figure 4, in its order; DisCo-CLIP beside them, as its reviewers asked.
METHODS = ("global", "formula", "disco", "ring_only", "ring")


@dataclass(frozen=True)
class Stage:
    """A row of the ablation, its Table 4.

    Attributes:
        title: What is new beside the row above.
        memory: How a rank's memory grows with the batch b, the width D and the number of ranks n.
    """

    title: str
    memory: str


# By entrant.
STAGES = {
    "global": Stage("dense: CLIP's global loss", "b²"),
    "formula": Stage("dense: open_clip's local loss", "b²/n"),
    "ring_only": Stage("ring only (Ring-CL)", "b²/n²"),
    "two_walks": Stage("+ tiles", "bD/n"),
    "ring": Stage("+ one pass for both directions", "bD/n"),
    "kept": Stage("+ kept logits", "b²/n"),
}
NAMES = tuple(dict.fromkeys((*METHODS, *STAGES)))
