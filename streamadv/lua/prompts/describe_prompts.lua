-- Say what a set of prompts is; what the first producer says stands. What the run has of it gets an id of its own, by which a
-- trainer notices that the run has lost it.
-- KEYS  void, prompts, prompt_state
-- ARGV  name, description, id
-- Returns  the description that the run has
redis.call('HSETNX', keys.prompts, ARGV[1], ARGV[2])
redis.call('HSETNX', keys.prompt_state, 'born', ARGV[3])
return redis.call('HGET', keys.prompts, ARGV[1])
