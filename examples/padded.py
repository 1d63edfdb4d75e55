"""A policy-gradient step in plain PyTorch, from tensors with a row per document.

    python examples/padded.py

The step is taken in micro-batches, whose gradients add up to those of the whole step.
"""

import torch
from torch import nn

import pgtoolkit

VOCABULARY = 32
DOCUMENTS = 8
LENGTH = 12
PROMPT = 4

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(VOCABULARY, 64), nn.Linear(64, VOCABULARY))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

# A sampler and a verifier would give these: token ids (B, T), which of them the model has written,
# and a reward for each document.
tokens = torch.randint(0, VOCABULARY, (DOCUMENTS, LENGTH))
position = torch.arange(LENGTH)
completion_lengths = torch.randint(1, LENGTH - PROMPT + 1, (DOCUMENTS, 1))
is_completion = (position >= PROMPT) & (position < PROMPT + completion_lengths)
rewards = (tokens == 7).sum(1).float()
advantages = rewards - rewards.mean()

# The logits at position t predict token t + 1, so that labels and mask are shifted by one.
inputs = tokens[:, :-1]
labels = tokens[:, 1:]
mask = is_completion[:, 1:]
with torch.no_grad():
    old_log_probs = model(inputs).log_softmax(-1).gather(-1, labels[..., None])[..., 0]

# Denominators are those of the whole step, and counted before its first backward pass.
trained = mask.sum(1)
totals = pgtoolkit.StepTotals(
    num_documents=DOCUMENTS,
    num_tokens=int(trained.sum()),
    num_empty_documents=int((trained == 0).sum()),
)

for update in range(4):
    step_loss = 0.0
    for rows in torch.arange(DOCUMENTS).split(3):
        arguments = pgtoolkit.from_padded(
            logits=model(inputs[rows]),
            labels=labels[rows],
            mask=mask[rows],
            old_log_probs=old_log_probs[rows],
            advantages=advantages[rows],
        )
        out = pgtoolkit.policy_loss(
            **arguments, loss="grpo", aggregation="token_mean", totals=totals
        )
        out.loss.backward()
        step_loss += out.loss.item()
    optimizer.step()
    optimizer.zero_grad()
    print(f"update {update}: loss {step_loss:.4f}")
