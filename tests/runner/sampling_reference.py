"""Sampling, written to be read: one row at a time, in float64, following the definitions word for word."""

import numpy as np
from numpy.typing import NDArray

from tidegate.base.request import SamplingParams

Row = NDArray[np.float64]


def adjusted(logits: Row, params: SamplingParams, prompt: list[int], output: list[int]) -> Row:
    """Logit bias, min_tokens, then repetition, frequency and presence penalties."""
    x = np.array(logits, dtype=np.float64)
    for token, added in params.logit_bias.items():
        x[token] += added
    if len(output) < params.min_tokens:
        for token in params.stop_token_ids:
            x[token] = -np.inf
    for token in set(prompt + output):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in output:
        x[token] -= params.frequency_penalty
    for token in set(output):
        x[token] -= params.presence_penalty
    return x


def probabilities(x: Row, params: SamplingParams) -> Row:
    """Of adjusted logits, after temperature, min-p, top-k and top-p; 0 for what is left out."""
    p = _softmax(x, params.temperature)
    p[p < params.min_p * p.max()] = 0
    if 0 < params.top_k < len(p):
        p[p < sorted(p, reverse=True)[params.top_k - 1]] = 0
    p /= p.sum()
    if params.top_p < 1:
        better = 0.0
        last_kept = p.max()
        for probability in sorted(p, reverse=True):
            if better >= params.top_p:
                break
            last_kept = probability
            better += probability
        p[p < last_kept] = 0
    return np.asarray(p / p.sum())


def _softmax(x: Row, temperature: float) -> Row:
    weights = np.exp((x - x.max()) / temperature)
    return np.asarray(weights / weights.sum())
