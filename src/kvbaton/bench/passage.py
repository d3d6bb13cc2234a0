"""The text that the demo asks about; long enough that prefill takes a while and its KV goes over in pieces.

Invariant: written for this project. Read `demo` for how it is asked.
"""

from __future__ import annotations

PASSAGE = """\
The relay race is one of the oldest team events in athletics. Four runners share one distance. The first runner starts \
from blocks with a baton in the right hand, runs the first leg, and passes the baton to the second runner inside a \
marked zone that is thirty metres long. The second runner is already moving when the baton arrives. Passing it takes \
less than a second, and a team that has practised loses almost no speed. If the baton is dropped, the runner who \
dropped it must pick it up. If it is passed outside the zone, the team is disqualified.

The order of the runners is chosen with care. The first runner must be quick out of the blocks and able to run the \
curve. The second runner covers the longest straight and handles the baton twice. The third runner must be good at \
running the curve and at both receiving and giving the baton. The last runner, who is called the anchor, is usually \
the fastest of the team, because the anchor must hold a lead or win back lost ground while tired rivals run beside them.

Coaches say that races are won in the zone and not on the straight. A team of four good runners who pass the baton \
well beats a team of four excellent runners who pass it badly. In the pass without looking, the receiver starts to run \
when the giver reaches a mark on the track, stretches one hand back, and closes it when the baton touches the palm. \
Neither of them slows down. Teams practise this pass hundreds of times before a championship, first while walking, \
then while jogging, and at last at full speed."""

QUESTION = "What is the last runner of the team called, and why is it usually the fastest one?"


def prompt(question: str) -> str:
    """One user message: the text, then the question."""
    return f"Read this text and answer the question below it.\n\n{PASSAGE}\n\nQuestion: {question}"
