"""Where `python -m vllm.entrypoints.cli.main` finds the stand-in for vLLM."""

from processes.fake_vllm.serve import main

if __name__ == "__main__":
    main()
