"""One dense decoder that covers Llama and Qwen3 shapes."""
