"""Not part of the stack (stack/series.py leaves it out): what Python finds in a clone as `tinygrad.device` where no tinygrad is installed, since this
folder has only what the stack adds. It says so, and what to run instead. An installed tinygrad comes first, wherever Python is started."""
import sys
main = getattr(sys.modules["__main__"], "__spec__", None)
text = f"tinygrad is not installed for {sys.executable}: in this clone run ./dev run {f'-m {main.name}' if main else sys.argv[0] or 'SCRIPT'}, or " \
       "pip install '.[mesa]' first"
if main and main.name.startswith("tinygrad."): sys.exit(text)
raise ImportError(text)
