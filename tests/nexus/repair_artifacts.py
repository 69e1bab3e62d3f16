"""Synthetic repair artifacts with plausible numbers, for the tests of tables and figures."""
from __future__ import annotations

import math

FAMILIES = {"head": 0.006, "suffix": 0.3, "head+suffix": 0.02, "random": 0.25, "blend": 0.05, "oracle": 0.012}
SHARES = (2.0, 5.0, 10.0, 25.0, 50.0)
BEHIND = {"system": 1.0, "ensemble-4x1000": 0.3, "preamble-256": 0.5}
DEPTHS = (256, 512, 1024, 2048)
BLOCK, QUERY = 200, 20


def metric(value, spread=0.3, n=12, level=0.95, method="bca-bootstrap"):
    """A metric whose interval reaches `spread` of the value to both sides; none without a spread."""
    bounds = (value * (1 - spread), value * (1 + spread)) if spread else (None, None)
    return {"value": value, "ci_low": bounds[0], "ci_high": bounds[1], "n": n,
            "method": method if spread else "identical-samples", "level": level}


def top1(value, n=12, level=0.95):
    return {"value": value, "ci_low": max(0.0, value - 0.2), "ci_high": min(1.0, value + 0.1), "n": n,
            "method": "wilson", "level": level}


def artifact(experiment, rows):
    return {"experiment": experiment, "tuple": {"model": "synthetic", "llama_cpp": "b1234"},
            "config_sha256": "0123456789abcdef" * 4, "rows": rows}


def repair_row(arm, share, n_past, dkl, speedup, behind="system", probe="query", level=0.95):
    return {"arm": arm, "recompute_pct": share, "n_past": n_past, "probe": probe, "compiled_behind": behind,
            "dkl_nats": metric(dkl, 0.5 if dkl else 0, level=level), "top1": top1(0.9, level=level),
            "speedup": metric(speedup, 0.05, method="percentile-bootstrap", level=level),
            "ideal_speedup": metric(1.1 * speedup, 0.05, level=level),
            "latency_per_ideal": metric(1.1, 0.05, level=level),
            "latency_per_ideal_all_depths": metric(1.1, 0.05, 48, level)}


def frontier(depths=DEPTHS, level=0.95):
    """Divergence falls with the share; speed-up is what the token counts allow, and blend pays for its probe."""
    rows = []
    for n_past in depths:
        def speedup(share, arm="none"):
            probe = 0.04 * BLOCK if "blend" in arm else 0
            return 0.93 * (BLOCK + QUERY) / (BLOCK * share / 100 + probe + QUERY + 3)

        for behind, factor in BEHIND.items():
            leads = {"head": 0.006, "head+blend": 0.008}
            families = FAMILIES | leads if behind == "system" else leads
            deep = math.sqrt(256 / n_past)
            rows.append(repair_row("none", 0.0, n_past, 0.4 * factor * deep, speedup(0), behind, level=level))
            for i, (arm, base) in enumerate(families.items()):
                for share in SHARES if behind == "system" else SHARES[:4]:
                    dkl = base * factor * deep * (2 / share) ** (0.4 + 0.05 * i) + 0.001
                    rows.append(repair_row(arm, share, n_past, dkl, speedup(share, arm) * (1 + 0.01 * i), behind,
                                           level=level))
        rows.append(repair_row("full", 100.0, n_past, 0.0, 0.98, level=level))
        rows.append(repair_row("noise_floor", 100.0, n_past, 0.0015, 1.0, "nothing", level=level))
    return artifact("repair_frontier", rows + [row | {"probe": "block_end"} for row in rows])


def ttft_row(arm, n_past, protocol, speedup, dkl, curve_k=None, r_pct=0.0, behind="system", level=0.95):
    return {"n_past": n_past, "curve_k": curve_k, "arm": arm, "protocol": protocol, "r_pct": r_pct,
            "compiled_behind": behind, "prefill_ms": metric(1500.0, 0.02, 15, level),
            "splice_ms": metric(1500.0 / speedup, 0.02, 15, level), "speedup": metric(speedup, 0.03, 15, level),
            "speedup_without_one_low": 0.99 * speedup if protocol == "cold" else None,
            "speedup_without_one_high": 1.02 * speedup if protocol == "cold" else None,
            "ideal_speedup": metric(speedup * 1.05, 0.03, 15, level),
            "latency_per_ideal": metric(1.05, 0.03, 15, level), "dkl_nats": metric(dkl, 0.4 if dkl else 0, 10, level),
            "top1": top1(0.9, 10, level), "dkl_block_end_nats": metric(2 * dkl, 0.4 if dkl else 0, 10, level),
            "top1_block_end": top1(0.8, 10, level)}


def ttft(depths=DEPTHS, level=0.95):
    rows = []
    for n_past in depths:
        for curve in (4.0, 16.0):
            share = min(100.0, 5 + max(0, n_past - 256) / (256 * (curve - 1)) * 95)
            for protocol, resident in (("cold", n_past), ("warm", 0)):
                speedup = (resident + BLOCK + QUERY) / (resident + BLOCK * share / 100 + QUERY + 4)
                rows.append(ttft_row("suffix-R(n)", n_past, protocol, speedup, 0.4 / share if share < 100 else 0.0,
                                     curve, share, level=level))
        for arm, warm, dkl in (("none", 8.6, 0.12), ("head-4", 7.4, 0.004), ("head-10%", 5.2, 0.003),
                               ("engine-shift", 3.1, 0.12), ("group-cache", 9.4, 0.2)):
            rows.append(ttft_row(arm, n_past, "warm", warm, dkl * 256 / n_past, level=level))
            rows.append(ttft_row(arm, n_past, "cold", (n_past + 220) / (n_past + 25), dkl, level=level))
        rows.append(ttft_row("prefix-reuse", n_past, "cold", (n_past + 220) / 220, 0.0, level=level))
    return artifact("deep_splice_ttft", rows)


def gating_row(n_past, context, predictor, rho, level=0.95):
    return {"n_past": n_past, "context": context, "predictor": predictor, "max_drift": metric(20.0, 0.1, 10, level),
            "mean_drift": metric(9.0, 0.1, 10, level), "spearman_rho": rho,
            "spearman_rho_within_layer": metric(0.05, 0.1, 9, level)}


def gating(rhos=None, level=0.95):
    """`rhos`: predictor to (value, relative spread)."""
    rhos = rhos or {"context_k_variance": (0.3, 0.2), "sink_key_norm": (-0.1, -0.2), "block_key_norm": (0.2, 0.1)}
    return artifact("gating_nogo", [
        gating_row(n_past, context, predictor, metric(rho, spread, 10, level), level)
        for n_past in (256, 1024, 2048) for context in ("on", "off") for predictor, (rho, spread) in rhos.items()])


def policy_row(n_past, which, dkl, upper, violations=0.1, level=0.95, arm="head-10%", chosen=True):
    return {"n_past": n_past, "set": which, "arm": arm, "chosen": chosen, "recompute_pct": 10.0,
            "compiled_behind": "ensemble-4x256", "epsilon_nats": 0.02, "dkl_nats": dkl and metric(dkl, 0.3, 20, level),
            "dkl_upper_nats": upper, "violation_rate": top1(violations, 20, level), "top1": top1(0.95, 20, level),
            "noise_floor_nats": metric(0.0015, 0.2, 20, level), "speedup": metric(5.1, 0.03, 20, level)}


def policy():
    return artifact("calibrated_repair", [policy_row(n_past, which, dkl, dkl * 1.3) for n_past in (256, 1024)
                                          for which, dkl in (("calibration", 0.008), ("test", 0.012))])


def layout_row(model, v_layout, setting, n_past, arm="none", message=None, dkl=0.01):
    refused = message is not None
    return {"model": model, "v_layout": v_layout, "setting": setting, "n_past": n_past, "arm": arm,
            "status": "refused" if refused else "spliced", "message": message,
            "dkl_nats": None if refused else metric(dkl, 0.3, 5)}


def layouts():
    return artifact("layouts", [
        *(layout_row("synthetic", v_layout, "default", n_past, arm, dkl=0.001 * (1 + n_past))
          for v_layout in ("row", "transposed") for n_past in (0, 256) for arm in ("none", "head-16")),
        layout_row("gemma", "row", "swa | full", 0, message="sliding window:\nuse swa_full")])
