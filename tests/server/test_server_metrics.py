import pytest
from prometheus_client.parser import text_string_to_metric_families

from tidegate.base.stats import PredictionError
from tidegate.server.fake import Script


def scrape(server) -> dict[tuple[str, ...], float]:
    """Value by (sample name, and the labels besides the model's and the engine's)."""
    response = server.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == "smol"
            assert sample.labels.pop("engine") == "0"
            samples[(sample.name, *sample.labels.values())] = sample.value
    return samples


@pytest.fixture
def server(live):
    return live(lambda request: Script([300], cached_tokens=1))


def test_latencies_and_tokens_of_a_request_are_counted_once(server):
    server.http.post("/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 5})
    seen = scrape(server)
    for name, count in (
        ("vllm:time_to_first_token_seconds", 1),
        ("vllm:inter_token_latency_seconds", 4),
        ("vllm:request_time_per_output_token_seconds", 1),
        ("vllm:e2e_request_latency_seconds", 1),
        ("vllm:request_prompt_tokens", 1),
        ("vllm:request_generation_tokens", 1),
    ):
        assert seen[(f"{name}_count",)] == count, name
    assert seen[("vllm:prompt_tokens_total",)] == 3
    assert seen[("vllm:generation_tokens_total",)] == 5
    assert seen[("vllm:request_success_total", "length")] == 1


def test_every_request_ends_under_one_reason(live):
    ways = iter(["length", "error", "rejected"])
    server = live(lambda request: Script([300], finish=next(ways, "length")))
    for _ in range(3):
        server.http.post("/v1/completions", json={"prompt": [1], "max_tokens": 2})
    server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 50, "stop": server_says(server)})
    seen = scrape(server)
    reasons = {reason: seen[("vllm:request_success_total", reason)] for reason in ("stop", "length", "abort", "error")}
    assert reasons == {"stop": 1, "length": 1, "abort": 0, "error": 2}


def test_errors_of_predictions_are_shown_by_kind_and_factors_by_lane(server):
    assert not any(name.startswith("tidegate:prediction") for name, *_ in scrape(server))
    stats = server.engine.statistics
    stats.prediction_errors = {
        "decode": PredictionError(40, 0.02, 0.07),
        "prefill beside": PredictionError(9, 0.1, 0.3),
    }
    stats.prediction_factors = {"hybrid": 1.05}
    seen = scrape(server)
    assert seen[("tidegate:prediction_error", "decode", "0.5")] == 0.02
    assert seen[("tidegate:prediction_error", "prefill beside", "0.95")] == 0.3
    assert seen[("tidegate:prediction_factor", "hybrid")] == 1.05


def server_says(server) -> str:
    return server.http.post("/detokenize", json={"tokens": [300]}).json()["prompt"]


def test_the_engines_statistics_are_those_of_the_scrape(server):
    stats = server.engine.statistics
    stats.waiting, stats.prefilling = 4, 2
    stats.blocks_total, stats.blocks_free, stats.blocks_cached, stats.blocks_used = 100, 50, 25, 25
    stats.prefix_queries_tokens, stats.prefix_hits_tokens, stats.preemptions = 70, 30, 5
    stats.handovers, stats.handover_copied_bytes = 8, 4096
    stats.lanes["D"].busy_seconds, stats.lanes["D"].batches, stats.lanes["D"].restarts = 1.5, 12, 1
    seen = scrape(server)
    for key, value in {
        ("vllm:num_requests_waiting",): 4,
        ("vllm:num_requests_running",): 2,
        ("vllm:kv_cache_usage_perc",): 0.25,
        ("vllm:prefix_cache_queries_total",): 70,
        ("vllm:prefix_cache_hits_total",): 30,
        ("vllm:num_preemptions_total",): 5,
        ("tidegate:handovers_total",): 8,
        ("tidegate:handover_copied_bytes_total",): 4096,
        ("tidegate:kv_blocks", "cached"): 25,
        ("tidegate:mode", "semi"): 1,
        ("tidegate:engine_up",): 1,
        ("tidegate:lane_share", "P"): 0.5,
        ("tidegate:lane_alive", "P"): 1,
        ("tidegate:lane_busy_seconds_total", "D"): 1.5,
        ("tidegate:lane_batches_total", "D"): 12,
        ("tidegate:lane_restarts_total", "D"): 1,
    }.items():
        assert seen[key] == value, key


def test_what_lanes_have_of_a_gpu_is_told_where_there_is_one(server):
    assert not [
        name for name, *_ in scrape(server) if name in ("tidegate:lane_sms", "tidegate:lane_extra_memory_bytes")
    ]
    lane = server.engine.statistics.lanes["D"]
    lane.sms, lane.extra_memory_bytes = 68, 1 << 29
    seen = scrape(server)
    assert seen[("tidegate:lane_sms", "D")] == 68
    assert seen[("tidegate:lane_extra_memory_bytes", "D")] == 1 << 29
    assert server.http.get("/admin/stats").json()["lanes"]["D"]["sms"] == 68


def test_how_attention_of_hybrid_batches_ran_is_told_where_a_lane_has_the_choice(server):
    assert not any(name.startswith("tidegate:lane_hybrid") for name, *_ in scrape(server))
    server.engine.statistics.lanes["D"].hybrid_attention = {"apart": 5, "pod": 7}
    seen = scrape(server)
    assert seen[("tidegate:lane_hybrid_batches_total", "apart", "D")] == 5
    assert seen[("tidegate:lane_hybrid_batches_total", "pod", "D")] == 7
    assert server.http.get("/admin/stats").json()["lanes"]["D"]["hybrid_attention"] == {"apart": 5, "pod": 7}


def test_a_dead_engine_is_told_and_what_was_observed_stays(server):
    server.http.post("/v1/completions", json={"prompt": [1], "max_tokens": 1})
    server.call(server.engine.die)
    seen = scrape(server)
    assert seen[("tidegate:engine_up",)] == 0
    assert seen[("vllm:generation_tokens_total",)] == 1
    assert ("vllm:num_requests_running",) not in seen
