"""What FP8 costs in accuracy, of weights, of the KV cache and of both: the same model over the same text, on the CPU.

    python benchmarks/fp8_accuracy.py [--model PATH] [--tokens 32]

For each form: the perplexity of a text; how often its best next token is float32's, in the text and along float32's own
greedy continuations of the text's sentences; the mean difference of logits; and how long greedy continuations agree.
The products on the CPU are an emulation of the GPU's: the same numbers, added in float32.
"""

import argparse

from cpu_accuracy import TEXT, OneSequence, perplexity, tokenizer_of

from tidegate.models.demo import demo_model_path
from tidegate.models.sources import open_model

FORMS = {
    "float32": (None, "float32"),
    "weights in fp8": ("fp8", "float32"),
    "KV cache in fp8": (None, "float8_e4m3fn"),
    "both in fp8": ("fp8", "float8_e4m3fn"),
    "weights in int8": ("int8", "float32"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="(default: SmolLM2-135M-Instruct)")
    parser.add_argument("--tokens", type=int, default=32, help="of each greedy continuation (default: 32)")
    arguments = parser.parse_args()
    source = open_model(arguments.model or str(demo_model_path()))
    tokenizer = tokenizer_of(source)
    text = tokenizer(TEXT).input_ids
    prompts = [tokenizer(sentence).input_ids for sentence in TEXT.split(". ")]
    exact = OneSequence(source, None, len(text) + 512)
    expected = exact.logits(text)
    continuations = [exact.greedy(prompt, arguments.tokens) for prompt in prompts]
    print(f"text of {len(text)} tokens, {len(prompts)} continuations of {arguments.tokens}")
    print("| | perplexity | same best next token: text / continuations | mean logit difference | part after |")
    print("|---|---|---|---|---|")
    for name, form in FORMS.items():
        model = OneSequence(source, form[0], len(text) + 512, form[1])
        logits = model.logits(text)
        same = float((logits.argmax(-1) == expected.argmax(-1)).float().mean())
        along = agreed = 0
        for prompt, theirs in zip(prompts, continuations, strict=True):
            chosen = model.logits([*prompt, *theirs[:-1]])[len(prompt) - 1 :].argmax(-1).tolist()
            along += sum(a == b for a, b in zip(chosen, theirs, strict=True))
            ours = model.greedy(prompt, arguments.tokens)
            agreed += next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))
        share = along / (len(prompts) * arguments.tokens)
        difference = float((logits - expected).abs().mean())
        print(
            f"| {name} | {perplexity(logits, text):.2f} | {same:.1%} / {share:.1%} | {difference:.2f} | "
            f"{agreed / len(prompts):.0f} tokens |",
            flush=True,
        )


if __name__ == "__main__":
    main()
