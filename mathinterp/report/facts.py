"""What is needed to make a run's numbers again: from its record alone."""

import json
from collections.abc import Mapping
from typing import Any

from mathinterp.report.cells import format_value


def facts_of(record: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text, in the order in which people ask."""
    versions = [
        ", ".join(f"{name} {value}" for name, value in made.items() if name not in ("commit", "source", "dirty"))
        for made in record.get("versions", [])
    ]
    return {
        "run": record["run_id"],
        "model": f"{record['model']} ({record['model_fingerprint']})",
        "prompts": f"{record['prompts']} ({record['prompts_fingerprint']})",
        "dtype": record["dtype"],
        "noise floor": noise(record["notes"].get("noise_floor")),
        "code": record["code_version"],
        "result format": format_value(record.get("result_format")),
        "parameters": json.dumps(record["parameters"], ensure_ascii=False),
        "made with": "; ".join(versions) or "not recorded",
        "started": str(record["started_at"])[:19].replace("T", " ") + " UTC",
        "seconds": format_value(record.get("wall_seconds")),
    }


def noise(measured: Any) -> str:
    """How far a change of nothing moved rows, in words."""
    if measured is None:
        return "not measured"
    if not isinstance(measured, Mapping):
        return format_value(measured)
    flipped = f"{measured['flipped_predictions']} of {measured['answers']} predictions flipped"
    return f"{format_value(measured['max_logprob_deviation'])} nats, {flipped}"
