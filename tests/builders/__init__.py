"""What the tests of several folders are made of.

losses         steps of documents as tensors, with a head, and their objectives
cuts           one step over micro-batches and ranks
families       loss families as a user writes them
models         small models, and folders of them
spread         one step through a model, whole or over ranks
runs           short real runs in this process
parallel_runs  runs of several processes
stores         run directories that are followed into MLflow stores
rollout_rows   rows of recorded rollouts, and files of them
threads        ranks as threads of this process
processes      ranks as processes
"""
