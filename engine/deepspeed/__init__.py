"""DeepSpeed's names over the engine, for unchanged scripts: `import xds.deepspeed`, or `xds --as-deepspeed`.

names.py says which names work, and in which file of this folder they are. stand_in.py makes DeepSpeed's modules
of that table. A name that xds does not implement can be imported, and is refused when it is used (missing.py).
"""
