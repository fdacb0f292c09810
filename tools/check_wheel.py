"""Check that an installed wheel carries the compiled native library (run by the release workflow)."""

import sys
from importlib.util import find_spec
from pathlib import Path

spec = find_spec("clearhead")
assert spec is not None, "clearhead is not installed"
assert spec.origin is not None
libraries = list((Path(spec.origin).parent / "ops" / "native").glob("_step.*.so"))
print(libraries or "the native library is missing from the wheel")
sys.exit(not libraries)
