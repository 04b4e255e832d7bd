"""A family added from outside the package: BigBird-Pegasus, whose decoder is built as BART's is."""

from hf_rfa.families import register_family, seq2seq_family

register_family(seq2seq_family("bigbird_pegasus"))
