"""The command line, ``hf-rfa``: a file per command, and `hf_rfa_cli.main`, which puts them together.

Importing anything of `hf_rfa` registers its models, for which torch and transformers are loaded. The command line stands
beside that package, and a command imports it once its options are known to be right: help, the version and mistakes take no
time.
"""
