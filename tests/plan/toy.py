"""Small settings with made-up devices, in which one design must win."""

from tidegate.base.specs import ModelSpec
from tidegate.plan.demand import Demand
from tidegate.plan.hardware import EFFICIENCY, GIB, Hardware
from tidegate.plan.setting import Setting
from tidegate.slo.goodput import Metric, Slo
from tidegate.slo.latency import Costs, LatencyModel

INFINITE = float("inf")
SLO = Slo(1.0, 0.03, Metric.TPOT)


def model(num_heads=1, **sizes):
    values = {
        "architecture": "LlamaForCausalLM",
        "num_layers": 2,
        "hidden_size": 512,
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": 64,
        "ffn_size": 1024,
        "vocab_size": 1000,
        "max_len": 100_000,
    }
    return ModelSpec(**values | sizes)


def device(link=INFINITE, memory_gib=80.0, **more):
    made = Hardware("toy", "toy GPU", 1e14, 1e12, int(memory_gib * GIB), link, link, 1e9, 100, 8, 2, EFFICIENCY)
    return made._replace(**more)


STEADY = LatencyModel(Costs((64, 4096), (0.01, 0.2), 0.0, 0.0, 0.0))
"""10 ms a step, and 5 ms more for each 100 tokens beyond the first 64."""

JEALOUS = LatencyModel(Costs((64, 65, 4096), (0.01, 0.1, 0.12), 0.0, 0.0, 0.0))
"""Decodes take 10 ms alone; with any prompt beside them, 100 ms or more."""


def setting(latency=STEADY, gpus=2, link=INFINITE, slo=SLO, lengths=((200, 20),), of=None, **of_device):
    return Setting("toy", of or model(), device(link, **of_device), gpus, slo, Demand(list(lengths)), latency)
