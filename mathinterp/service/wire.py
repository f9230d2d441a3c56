"""What client and service must know alike; imports neither."""

import mathinterp
from mathinterp.store.manifest import RESULT_FORMAT

PROTOCOL = 2  # raised when client and service of two versions would misunderstand each other
SIZES = "X-Mathinterp-Sizes"  # header: bytes of the parts of the body, as JSON: facts (JSON), then tables
USER = "X-Mathinterp-User"  # header: a name, percent-encoded
ABOUT = {"mathinterp": mathinterp.__version__, "protocol": PROTOCOL, "result_format": RESULT_FORMAT}
