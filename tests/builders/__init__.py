"""What the tests of several folders are made of.

losses         steps of documents as tensors, with a head, and their objectives
cuts           one step over micro-batches and ranks
models         small models, and folders of them
runs           short real runs in this process
parallel_runs  runs of several processes
stores         run directories that are followed into MLflow stores
rollout_rows   rows of recorded rollouts, and files of them
threads        ranks as threads of this process
processes      ranks as processes
browser        a real browser
vllm_server    a small server with vLLM's protocol, other_server with SGLang's
vllm_servers   how it is called, and what lives of it
shared_servers servers that the tests of a file share
"""
