-- A reward brought by `producer.score`: fill it in and end the group if that was the last one missing.
-- KEYS  void, group, open, groups, ended, ended_before, ledger, garbage, sizes
-- ARGV  group id, index, reward ('' = unscorable), score JSON, partial_min_usable, zero_variance, difficulty_low,
--       difficulty_high, dedupe_groups
-- Returns  'scored', 'duplicate' (it had a reward), 'ended' (the group had ended) or 'unknown' (no such group or place)
-- include ended
-- include sizes
-- include complete
redis.call('DEL', KEYS[1])
local keys = {group = KEYS[2], open = KEYS[3], groups = KEYS[4], ended = KEYS[5], ended_before = KEYS[6],
  ledger = KEYS[7], garbage = KEYS[8], sizes = KEYS[9]}
local policy = {partial_min_usable = ARGV[5], zero_variance = ARGV[6], difficulty_low = ARGV[7],
  difficulty_high = ARGV[8], dedupe_groups = tonumber(ARGV[9])}
local id, index, reward = ARGV[1], ARGV[2], ARGV[3]
if group_state(keys) == 'broken' then return 'unknown' end
local places = tonumber(redis.call('HGET', keys.group, 'places') or '')
if not places then return find_ended(keys, id) and 'ended' or 'unknown' end
if tonumber(index) < 0 or tonumber(index) >= places then return 'unknown' end
local text = redis.call('HGET', keys.group, index)
local usable = text and string.sub(text, 1, 1) == 'u'
if usable and member_fields(text) ~= '-' then return 'duplicate' end
if redis.call('HSETNX', keys.group, 'score:' .. index, ARGV[4]) == 0 then return 'duplicate' end
redis.call('HSET', keys.group, 'score_value:' .. index, reward == '' and 'x' or reward)
if usable then
  local _, bytes, key, role, reference = member_fields(text)
  redis.call('HINCRBY', keys.group, 'unscored', -1)
  if reward == '' then
    redis.call('HSET', keys.group, index, 'x')
    redis.call('HINCRBY', keys.group, 'unusable', 1)
    redis.call('HINCRBY', keys.ledger, 'open', -1)
    redis.call('HINCRBY', keys.ledger, 'dropped:unscorable', 1)
    redis.call('RPUSH', keys.garbage, key .. ' ' .. bytes)
  else
    redis.call('HSET', keys.group, index, 'u ' .. reward .. ' ' .. bytes .. ' ' .. key .. ' ' .. role .. ' ' .. reference)
    redis.call('HINCRBY', keys.group, 'usable', 1)
  end
  local _, counts = group_state(keys)
  if counts and is_complete(counts) then complete(keys, id, counts, policy) end
end
return 'scored'
