"""Parts that the tests of several folders build on.

losses         steps of random documents as tensors, with a head, and their losses by the reference
cuts           a step cut over micro-batches and ranks
models         small models, and folders of them
runs           short real runs in this process
commands       `pgtk` as a process: a run, or a sweep
refusals       the message of a command that is refused
parallel_runs  runs of several processes
stores         run directories, and the MLflow stores that follow them
studies        run directories of a small study
rollout_rows   rows of recorded rollouts, and files of them
threads        ranks as threads of this process
processes      ranks, and `pgtk`, as processes that are forked after their imports
terminals      a terminal, and the text on its screen
browser        a real browser
vllm_server    a small server with vLLM's protocol, and other_server with SGLang's
served_models  GPT-2 and Llama by torch alone, for these servers
vllm_servers   the command that starts it, and its living processes
shared_servers servers that the tests of a file share
"""
