"""What tests and benchmarks share, so that neither imports the other.

engines        engines and servers that a test session starts once, and the count of all that it starts
forkserver, preloaded     vLLM's processes as forks of one that has imported vLLM
tiny_models    random models of every architecture
chunks, answers, inside, tiered, vision, server     storing, asking, and looking into an engine
word_bags      an encoder whose similarities can be foretold
figures        where benchmarks write, and what machine the figures are from
paraphrases, lookalikes, quality/, vqa/     what the benchmarks of these names ask and measure
"""
