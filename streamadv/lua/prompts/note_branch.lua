-- Prompts that a trainer has in a checkpoint: a run that knows of no branch has lost them, see set_back_prompts.
-- KEYS  void, prompt_state
-- ARGV  branch of the trainer
-- Returns  1
redis.call('HSETNX', keys.prompt_state, 'branch', ARGV[1])
return 1
