-- The grouper's hand-off: move records from the rollouts stream into their groups; the record that completes a
-- group ends it in the same step.
-- KEYS  void, rollouts, open, groups, ended, ended_before, ledger, garbage, malformed, hash of each group concerned ...,
--       payload of each record that has one ...
-- ARGV  consumer group, partial_min_usable, zero_variance, difficulty_low, difficulty_high, dedupe_groups,
--       then for each entry: entry id, position of its group's hash in KEYS, group id, index, kind, reward, bytes,
--       payload key, role, reference JSON
-- Returns  {entry id, outcome, data source, ...} of each entry taken; outcome '' = its group goes on
-- An entry that somebody else has finished (XACK 0) is skipped; a record that its group does not wait for, or whose
-- payload is not there, is removed as malformed.
-- include ended
-- include malformed
-- include complete
-- include broken
redis.call('DEL', KEYS[1])
local keys = {open = KEYS[3], groups = KEYS[4], ended = KEYS[5], ended_before = KEYS[6], ledger = KEYS[7],
  garbage = KEYS[8], malformed = KEYS[9]}
local policy = {partial_min_usable = ARGV[2], zero_variance = ARGV[3], difficulty_low = ARGV[4],
  difficulty_high = ARGV[5], dedupe_groups = tonumber(ARGV[6])}

local function drop(at, reason)
  redis.call('HINCRBY', keys.ledger, 'dropped:' .. reason, 1)
  if ARGV[at + 6] ~= '0' then redis.call('RPUSH', keys.garbage, ARGV[at + 7] .. ' ' .. ARGV[at + 6]) end
end

-- Why the record is none that this run waits for, or nil.
local function record_problem(at, open)
  local id, index = ARGV[at + 2], tonumber(ARGV[at + 3])
  if ARGV[at + 4] == 'usable' and redis.call('EXISTS', ARGV[at + 7]) == 0 then
    return 'payload of ' .. id .. '/' .. index .. ' is not there'
  end
  local awaited = true
  if open then
    awaited = redis.call('HGET', keys.group, index) == 'p'
  else
    local text, key = find_ended(keys, id)
    if text then
      awaited = string.sub(text, index + 2, index + 2) == '2'
      if awaited then
        redis.call('HSET', key, id, string.sub(text, 1, index + 1) .. '1' .. string.sub(text, index + 3))
      end
    end
  end
  return not awaited and 'place ' .. index .. ' of group ' .. id .. ' waits for no record' or nil
end

local taken = {}
for at = 7, #ARGV, 10 do
  local entry, id, index, kind = ARGV[at], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4]
  if redis.call('XACK', KEYS[2], ARGV[1], entry) == 1 then
    redis.call('XDEL', KEYS[2], entry)
    leave(keys, 'rollouts', redis.call('XLEN', KEYS[2]))
    keys.group = KEYS[tonumber(ARGV[at + 1])]
    local outcome, data_source
    local state = group_state(keys)
    if state == 'broken' then outcome, data_source = end_broken(keys, id, policy) end
    local problem = record_problem(at, state == 'open')
    if problem then
      note_malformed(keys, 'rollouts', entry, 1, problem, ARGV[at + 9])
    elseif state ~= 'open' then
      local reason = kind
      if kind == 'usable' then
        local text = find_ended(keys, id)
        reason = text and string.sub(text, 1, 1) == 'c' and 'surplus' or 'late'
      end
      drop(at, reason)
    else
      local reward = ARGV[at + 5]
      if kind == 'usable' and reward == '' then
        reward = redis.call('HGET', keys.group, 'score_value:' .. index) or '-'
        if reward == 'x' then kind = 'unscorable' end
      else
        redis.call('HDEL', keys.group, 'score:' .. index)  -- the reward that came with the push stands
      end
      if kind == 'usable' then
        redis.call('HSET', keys.group, index, 'u ' .. reward .. ' ' .. ARGV[at + 6] .. ' ' .. ARGV[at + 7] .. ' '
          .. ARGV[at + 8] .. ' ' .. ARGV[at + 9])
        redis.call('HINCRBY', keys.group, reward == '-' and 'unscored' or 'usable', 1)
        redis.call('HINCRBY', keys.ledger, 'open', 1)
      else
        redis.call('HSET', keys.group, index, 'x')
        redis.call('HINCRBY', keys.group, 'unusable', 1)
        drop(at, kind)
      end
      outcome, data_source = try_complete(keys, id, policy)
    end
    taken[#taken + 1] = entry
    taken[#taken + 1] = outcome or ''
    taken[#taken + 1] = data_source or ''
  end
end
return taken
