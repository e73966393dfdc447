"""The reference trainer on megatron-core: `parallel-rl train CONFIG`."""
