"""How the embedded model was made; ``python -m envs_examples.demo_model.build --seed 0 --out DIR`` makes it again."""
