"""The differential fuzzer: random models and configs, trained by xds and by plain PyTorch, compared.

case.py      what is drawn from a seed          features_*.py  each way in which scripts differ, a class each
model.py     the model, blocks of many kinds    script.py      the training loop, the same for both sides
plain.py     the side of plain PyTorch          sharded.py     the side of xds
compare.py   when results count as equal        runner.py      warm ranks, hangs, crashes, one verdict a case
"""
