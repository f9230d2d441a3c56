"""Files of JSON lines."""

import json
from pathlib import Path


def write(path: Path, *records: object) -> str:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n")
    return str(path)
