"""For launchers that start a module, such as torchrun: ``python -m hf_rfa_cli`` is ``hf-rfa``."""

from .main import main

if __name__ == "__main__":
    main()
