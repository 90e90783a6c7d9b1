import pkgutil
import subprocess
import sys

import tidegate.server

MODULES = [f"tidegate.server.{module.name}" for module in pkgutil.iter_modules(tidegate.server.__path__)]


def test_the_server_process_loads_neither_torch_nor_transformers(smollm_gguf):
    program = f"""
import sys, importlib, pathlib
for name in {MODULES!r}: importlib.import_module(name)
from tidegate.server.load_tokenizer import load_tokenizer
assert load_tokenizer(pathlib.Path({str(smollm_gguf)!r})).encode("hello")
print(sorted(sys.modules.keys() & {{"torch", "transformers"}}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("[]\n", "", 0)
