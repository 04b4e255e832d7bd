"""A family added from outside the package: BigBird-Pegasus, whose decoder is built as BART's is."""

from hf_rfa.families import family_of, register_family

register_family(family_of("bigbird_pegasus"))
