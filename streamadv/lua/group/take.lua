-- The grouper's hand-off: move records from the rollouts stream into their groups; the record that completes a
-- group ends it in the same step.
-- KEYS  void, rollouts, open, groups, ended, ended_before, ledger, garbage, malformed, sizes,
--       group_hashes: group ..., (payloads: payload ...)
-- ARGV  consumer group, partial_min_usable, zero_variance, difficulty_low, difficulty_high, dedupe_groups,
--       then for each entry: entry id, position of its group's hash in the list, group id, index, kind, reward, bytes,
--       payload key, role, reference JSON
-- Returns  {entry id, outcome, data source, ...} of each entry taken; outcome '' = its group goes on
-- An entry that somebody else has finished (XACK 0) is skipped; a record that its group does not wait for, or whose
-- payload is not there, is removed as malformed.
-- include ended
-- include malformed
-- include sizes
-- include complete
-- include broken
local policy = {partial_min_usable = ARGV[2], zero_variance = ARGV[3], difficulty_low = ARGV[4],
  difficulty_high = ARGV[5], dedupe_groups = tonumber(ARGV[6])}

local function drop(at, reason)
  redis.pcall('HINCRBY', keys.ledger, 'dropped:' .. reason, 1)
  if ARGV[at + 6] ~= '0' then redis.call('RPUSH', keys.garbage, ARGV[at + 7] .. ' ' .. ARGV[at + 6]) end
end

local function refuse(at, problem)
  note_malformed(keys, 'rollouts', ARGV[at], 1, problem, ARGV[at + 9])
end

local function no_payload(at)
  return 'payload of ' .. ARGV[at + 2] .. '/' .. ARGV[at + 3] .. ' is not there'
end

local function not_awaited(at)
  return 'slot ' .. ARGV[at + 3] .. ' of group ' .. ARGV[at + 2] .. ' waits for no record'
end

-- A record whose group is not open.
local function take_late(at)
  local id, index, kind = ARGV[at + 2], tonumber(ARGV[at + 3]), ARGV[at + 4]
  if kind == 'usable' and redis.call('EXISTS', ARGV[at + 7]) == 0 then return refuse(at, no_payload(at)) end
  local text, key = find_ended(keys, id)
  if text then
    if string.sub(text, index + 2, index + 2) ~= '2' then return refuse(at, not_awaited(at)) end
    redis.call('HSET', key, id, string.sub(text, 1, index + 1) .. '1' .. string.sub(text, index + 3))
  end
  drop(at, kind ~= 'usable' and kind or (text and string.sub(text, 1, 1) == 'c' and 'surplus' or 'late'))
end

-- Records of an open group, from records[first] up to the one that completes it. Returns which one was the last,
-- and the outcome and data source of a group that has ended.
local function take_open(records, first, counts)
  local indices, payloads = {}, {}
  for i = first, #records do
    indices[#indices + 1] = ARGV[records[i] + 3]
    if ARGV[records[i] + 4] == 'usable' then payloads[#payloads + 1] = ARGV[records[i] + 7] end
  end
  local slots = redis.call('HMGET', keys.group, unpack(indices))
  local all_there = #payloads == 0 or redis.call('EXISTS', unpack(payloads)) == #payloads
  local waits, members, rewarded, unscored = {}, {}, {}, 0
  for i, index in ipairs(indices) do waits[index] = slots[i] == 'p' end
  local usable, unusable, last = counts.usable, counts.unusable, first - 1
  repeat
    last = last + 1
    local at = records[last]
    local index, kind, reward = ARGV[at + 3], ARGV[at + 4], ARGV[at + 5]
    if kind == 'usable' and not all_there and redis.call('EXISTS', ARGV[at + 7]) == 0 then
      refuse(at, no_payload(at))
    elseif not waits[index] then
      refuse(at, not_awaited(at))
    else
      waits[index] = false
      if kind == 'usable' and reward == '' then
        reward = redis.call('HGET', keys.group, 'score_value:' .. index) or '-'
        if reward == 'x' then kind = 'unscorable' end
      else
        rewarded[#rewarded + 1] = 'score:' .. index  -- the reward that came with the push stands
      end
      members[#members + 1] = index
      if kind ~= 'usable' then
        members[#members + 1] = 'x'
        counts.unusable = counts.unusable + 1
        drop(at, kind)
      else
        members[#members + 1] = 'u ' .. reward .. ' ' .. ARGV[at + 6] .. ' ' .. ARGV[at + 7] .. ' ' .. ARGV[at + 8] .. ' '
          .. ARGV[at + 9]
        if reward == '-' then unscored = unscored + 1 else counts.usable = counts.usable + 1 end
      end
    end
  until last == #records or (#members > 0 and is_complete(counts))
  usable, unusable = counts.usable - usable, counts.unusable - unusable
  if #members > 0 then redis.call('HSET', keys.group, unpack(members)) end
  if #rewarded > 0 then redis.call('HDEL', keys.group, unpack(rewarded)) end
  if usable > 0 then redis.call('HINCRBY', keys.group, 'usable', usable) end
  if unscored > 0 then redis.call('HINCRBY', keys.group, 'unscored', unscored) end
  if unusable > 0 then redis.call('HINCRBY', keys.group, 'unusable', unusable) end
  if usable + unscored > 0 then redis.pcall('HINCRBY', keys.ledger, 'open', usable + unscored) end
  if #members > 0 and is_complete(counts) then return last, complete(keys, ARGV[records[last] + 2], counts, policy) end
  return last
end

-- What is taken, and for each group (by the position of its hash) where its records begin in ARGV.
local acked, positions, records_of = {}, {}, {}
for at = 7, #ARGV, 10 do
  if redis.call('XACK', keys.rollouts, ARGV[1], ARGV[at]) == 1 then
    acked[#acked + 1] = ARGV[at]
    local position = tonumber(ARGV[at + 1])
    if not records_of[position] then
      records_of[position] = {}
      positions[#positions + 1] = position
    end
    table.insert(records_of[position], at)
  end
end
if #acked == 0 then return {} end
redis.call('XDEL', keys.rollouts, unpack(acked))
leave(keys, 'rollouts', #acked, redis.call('XLEN', keys.rollouts))

local taken = {}
for _, position in ipairs(positions) do
  local records, first = records_of[position], 1
  keys.group = keys.group_hashes[position]
  while first <= #records do
    local last, outcome, data_source = first, nil, nil
    local state, counts = group_state(keys)
    if state == 'open' then
      last, outcome, data_source = take_open(records, first, counts)
    else
      if state == 'broken' then outcome, data_source = end_broken(keys, ARGV[records[first] + 2], policy) end
      take_late(records[first])
    end
    for i = first, last do
      local ended = i == last and outcome
      taken[#taken + 1] = ARGV[records[i]]
      taken[#taken + 1] = ended or ''
      taken[#taken + 1] = ended and data_source or ''
    end
    first = last + 1
  end
end
return taken
