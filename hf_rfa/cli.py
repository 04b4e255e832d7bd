"""The command line for launchers that start a module, such as torchrun: ``python -m hf_rfa.cli`` is ``hf-rfa``."""

from hf_rfa_cli.main import app, main

__all__ = ["app", "main"]

if __name__ == "__main__":
    main()
