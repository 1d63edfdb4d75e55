"""Mistakes of LoRA for `test_mutants.py`: (name, file, edits, what catches it)."""

MODEL, RUNS = "tests/model/test_lora.py", "tests/training/test_lora.py"
MEMORY = f"{MODEL}::test_frozen_weights_are_in_the_compute_type_and_adapters_in_float32_with_moments"

MUTANTS_OF_LORA = [
    (
        "frozen weights held in float32",
        "model/build.py",
        {"dtype if config.lora_rank else torch.float32": "torch.float32"},
        (f"{MEMORY}[llama-bfloat16-frozen0]",),
    ),
    (
        "adapters trained in bfloat16, as peft makes them beside weights of that type",
        "model/lora.py",
        {"part.float()": "pass"},
        (f"{MEMORY}[llama-bfloat16-frozen0]",),
    ),
    (
        "the sampler gets the weights that training began with",
        "model/lora.py",
        {"_merged(layers[owner]) if rest": "tensor if rest"},
        (
            f"{MODEL}::test_the_merged_weights_are_the_policy[llama]",
            f"{MODEL}::test_completions_are_of_the_merged_model[gpt2-true]",
        ),
    ),
    (
        "a target that names no layer is left out without a word, as peft does",
        "model/lora.py",
        {"in wanted:\n        if not any": "in wanted:\n        if not linear and not any"},
        (f"{MODEL}::test_targets_that_are_no_linear_layer_are_refused[a misspelt one]",),
    ),
    (
        "an LM head that is adapted, which the loss does not see",
        "model/lora.py",
        {"isinstance(x, kinds) and x is not head": "isinstance(x, kinds)"},
        (f"{MODEL}::test_targets_that_are_no_linear_layer_are_refused[the head]",),
    ),
    (
        "a frozen head's gradient is computed and thrown away",
        "kernels/products.py",
        {"if ctx.needs_input_grad[1]:": "if True:"},
        (
            "tests/kernels/test_weight_gradient.py::test_a_frozen_head_has_no_product_for_its_gradient[torch-dtype1-True]",
        ),
    ),
    (
        "adapters put beside other weights than those that they were trained with",
        "training/state.py",
        {"!= policy.base_digest:": "!= policy.base_digest and found is None:"},
        (f"{RUNS}::test_adapters_beside_other_weights_are_refused",),
    ),
    (
        "large adapters in several files, of which peft reads none",
        "training/checkpoint.py",
        {"layout, kind == ADAPTERS)": "layout, False)"},
        (f"{RUNS}::test_large_adapters_are_one_file",),
    ),
    (
        "the moments of adapters not stored",
        "training/state.py",
        {"module.optimizer.state.get(weight, {})": "module.optimizer.state.get(name, {})"},
        (f"{RUNS}::test_a_checkpoint_holds_the_adapters_alone",),
    ),
    (
        "an export of the model without its adapters",
        "training/export.py",
        {"    load_weights(policy, state)\n": ""},
        (f"{RUNS}::test_an_export_is_the_whole_model_in_its_own_number_type",),
    ),
    (
        "a folder of adapters taken for a model, with whatever lies beside them",
        "system/model_folder.py",
        {"if (folder / ADAPTER_SETTINGS).exists():": "if False:"},
        (f"{RUNS}::test_a_folder_of_adapters_is_no_model",),
    ),
]
