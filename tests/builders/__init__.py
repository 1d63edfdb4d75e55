"""What the tests of several folders are made of.

losses         steps of documents as tensors, with a head, and their objectives
cuts           one step over micro-batches and ranks
families       loss families as a user writes them
models         small models, and folders of them
spread         one step through a model, whole or over ranks
parallel_runs  runs of several processes
threads        ranks as threads of this process
processes      ranks as processes
"""
