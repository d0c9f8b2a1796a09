"""The bundled demo model: an ordinary Hugging Face folder, its prompts, and the program that makes it again."""
