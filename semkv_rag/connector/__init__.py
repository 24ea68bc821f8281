"""What vLLM calls: the KV connector, the worker class, and the connector for images' features.

A request's way, by the process that each step runs in:

Scheduler (`scheduler/`, in vLLM's engine process)
    on_new_request                    options are read, stored chunks are looked up, the plan is made, the
                                      blocks that it fills get hashes of their own
    get_num_new_matched_tokens        how many tokens the blend will fill, asynchronously; None until
                                      there is a plan
    update_state_after_alloc          the request has its blocks: a `BlendTask`
    build_connector_meta              the step's `StepMetadata`: blends that begin, and how many tokens
                                      the blends may compute
    update_connector_output           `BlendResult`s go into the reports; the request may be scheduled
    request_finished                  the report leaves

Worker (`worker/`, one for each rank)
    compile_or_warm_up_model          the model is bound and the gate checks it
    start_load_kv                     behind the forward, blends go on: KV is loaded and moved by a
                                      thread, tokens are picked and recomputed within the step's budget
    wait_for_save                     captures: blocks are copied, and written by threads
    get_finished                      the requests whose blends ended
    build_connector_worker_meta       their `BlendResult`s

Both sides know `messages`, and neither imports the other. `images/` is the same for the encoder cache,
with both its sides.
"""
