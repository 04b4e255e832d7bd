"""The experiments of the papers, trained here: models of one size, on one budget, that differ in their attention alone.

    python -m benchmarks.experiments images --small --output benchmarks/results/experiments

Peng et al. 2021 is Random Feature Attention; Katharopoulos et al. 2020 is the linear attention of elu + 1.
"""
