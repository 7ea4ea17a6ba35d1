"""The reward that compares texts."""

from ..types import Sample


def exact_match(sample: Sample) -> float:
    """1.0 where the response is the answer, white space at the ends aside, else 0.0.

    An answer that is a list holds alternatives: any of them is right.
    """
    answer = sample.prompt.answer
    alternatives = answer if isinstance(answer, list) else [answer]
    return float(any(sample.response.strip() == str(each).strip() for each in alternatives))
