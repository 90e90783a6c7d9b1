"""What int8 costs in accuracy: the same model in float32 and int8 over the same text.

    python benchmarks/cpu_accuracy.py [--model PATH] [--tokens 64]

Prints the perplexity of a text under both, how often their best next token is the same, the largest and the typical
difference between their logits, how far either differs from itself when it reads the text in slices instead of at once,
and how far their greedy continuations of the text's sentences agree. Then, along
float32's greedy answers to a few questions in the model's chat template, how much less likely int8 finds each token
than float32 on average (the Kullback-Leibler divergence), and how often it would choose it.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoTokenizer

from tidegate.base.specs import PoolSpec
from tidegate.device.pool import Pool
from tidegate.kernels.attention import AttentionRows
from tidegate.kernels.choose_attention import attention_over
from tidegate.kernels.cpu_attention import CpuAttention
from tidegate.models.demo import demo_model_path
from tidegate.models.fp8_weights import kv_scales
from tidegate.models.linears import load, stored
from tidegate.models.registry import build_model
from tidegate.models.sources import ModelSource, open_model

TEXT = """\
The tide mill at the mouth of the river was older than the village around it. Twice a day the sea filled the pond \
behind the dam, and twice a day the miller opened the gate and let the water out again, so that it turned the great \
wheel and the stones above it. Because the tides come about fifty minutes later each day, the miller never kept the \
hours of other people. In some weeks he worked in the morning and the evening, in others at noon and in the middle \
of the night, and the farmers who brought their grain had to ask the moon when to come.

A gate sounds like a simple thing, but it is where all the skill lies. If it is opened too early, the sea outside \
is still high and the wheel hardly moves. If it is opened too late, the pond does not empty before the next flood, \
and part of the water is wasted. A good miller watches the level on both sides and opens the gate a little at a \
time. He knows how much each stone needs, and he never runs both at full speed when there is water enough for only \
one and a half.

Engineers who build computers face the same question today. A machine has only so much memory and so much \
arithmetic, and several kinds of work want them at once. Reading a long document is heavy work that can be done in \
large pieces; writing an answer is light work that must be done without a pause. If the heavy work is let through \
unchecked, the answer stops in the middle of a sentence. If the light work has everything to itself, most of the \
machine stands idle. Someone has to stand at the gate and decide, many times each second, how far to open it.

To make bread from the flour, mix five hundred grams with three hundred and fifty grams of water, ten grams of salt \
and a little yeast. Knead the dough for ten minutes, cover it, and let it rise in a warm place until it has \
doubled. Then shape it into a loaf, let it rest for another half an hour, and bake it at two hundred and thirty \
degrees for about forty minutes. The bread is done when it sounds hollow as you knock on its base."""

QUESTIONS = """\
What is the capital of France?
Name three colors.
Write a haiku about the sea.
Who wrote Romeo and Juliet?
What is 2+2?
Explain what a tide mill is in two sentences.
Translate 'good morning' to Spanish.
List the planets.
Give me a recipe for pancakes.
What does HTTP stand for?"""

SLICES = (1, 17, 100)  # tokens


class OneSequence:
    """One sequence in a pool of its own."""

    def __init__(self, source: ModelSource, quantization: str | None, max_len: int, kv_dtype: str = "float32") -> None:
        spec = source.spec
        shapes = stored(spec, quantization).items()
        weights = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (dtype, shape) in shapes}
        load(source, weights)
        pool = Pool.allocate(spec, PoolSpec(max_len // 16 + 1, 16, 1, max_len, kv_dtype))
        pool.table[0] = torch.arange(pool.table.shape[1], dtype=torch.int32)
        self._attention = attention_over(CpuAttention, spec, pool.kv, pool.table, kv_scales(spec, weights))
        self._model = build_model(spec, weights, self._attention)

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], start: int = 0) -> torch.Tensor:
        """``[len(tokens), vocab]``, of tokens at positions ``start`` and on, over those fed before."""
        self._attention.plan(AttentionRows([0], [start], [len(tokens)]))
        positions = torch.arange(start, start + len(tokens))
        return self._model.logits(self._model.forward(torch.tensor(tokens), positions))

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        tokens = [int(self.logits(prompt)[-1].argmax())]
        for position in range(len(prompt), len(prompt) + count - 1):
            tokens.append(int(self.logits(tokens[-1:], position)[-1].argmax()))
        return tokens


def perplexity(logits: torch.Tensor, tokens: Sequence[int]) -> float:
    return float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:])).exp())


def tokenizer_of(source: ModelSource) -> Any:
    """transformers'."""
    if source.gguf_file is not None:
        return AutoTokenizer.from_pretrained(source.gguf_file.parent, gguf_file=source.gguf_file.name)
    return AutoTokenizer.from_pretrained(source.tokenizer_dir)


def divergence(exact: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """Of each row's distribution of the next token, in nats: ``[N]`` of logits ``[N, vocab]``."""
    likely = exact.log_softmax(-1)
    return (likely.exp() * (likely - rounded.log_softmax(-1))).sum(-1)


def until(last: int, tokens: list[int]) -> list[int]:
    """The tokens up to and with the first ``last``, all if there is none."""
    return tokens[: tokens.index(last) + 1] if last in tokens else tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="(default: SmolLM2-135M-Instruct)")
    parser.add_argument("--tokens", type=int, default=64, help="of each greedy continuation (default: 64)")
    arguments = parser.parse_args()
    source = open_model(arguments.model or str(demo_model_path()))
    tokenizer = tokenizer_of(source)
    text = tokenizer(TEXT).input_ids
    models = {name: OneSequence(source, name, len(text) + 512) for name in (None, "int8")}
    exact, rounded = (model.logits(text) for model in models.values())
    difference = (rounded - exact).abs()
    print(f"text of {len(text)} tokens")
    print(f"perplexity: float32 {perplexity(exact, text):.3f}, int8 {perplexity(rounded, text):.3f}")
    print(f"same best next token: {(exact.argmax(-1) == rounded.argmax(-1)).float().mean():.1%}")
    print(f"difference of logits: largest {difference.max():.2f}, mean {difference.mean():.3f}")
    print(f"standard deviation of logits: {exact.std():.2f}")
    for (name, model), whole in zip(models.items(), (exact, rounded), strict=True):
        for size in SLICES:
            cut = torch.cat([model.logits(text[at : at + size], at) for at in range(0, len(text), size)])
            best = (cut.argmax(-1) == whole.argmax(-1)).float().mean()
            mean = (cut - whole).abs().mean()
            print(f"{name or 'float32'} in slices of {size}: mean difference {mean:.6f}, same best {best:.1%}")
    same = agreed = count = 0
    for sentence in TEXT.split(". "):
        prompt = tokenizer(sentence).input_ids
        ours, theirs = (model.greedy(prompt, arguments.tokens) for model in models.values())
        count += 1
        same += ours == theirs
        agreed += next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))
    print(f"greedy continuations of {arguments.tokens} tokens that are the same: {same} of {count}")
    print(f"tokens before they part: {agreed / count:.0f} on average")
    along = []
    for question in QUESTIONS.splitlines():
        chat = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
        prompt = list(chat["input_ids"])
        answers = [until(tokenizer.eos_token_id, model.greedy(prompt, arguments.tokens)) for model in models.values()]
        print(question, *(f"  {tokenizer.decode(answer)!r}" for answer in answers), sep="\n")
        read = [*prompt, *answers[0][:-1]]
        along.append([model.logits(read)[len(prompt) - 1 :] for model in models.values()])
    exact, rounded = (torch.cat(logits) for logits in zip(*along, strict=True))
    print(f"along float32's answers: divergence {divergence(exact, rounded).mean():.4f}")
    print(f"same best next token: {(exact.argmax(-1) == rounded.argmax(-1)).float().mean():.1%}")


if __name__ == "__main__":
    main()
