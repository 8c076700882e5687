-- The grouper's hand-off: move records from the rollouts stream into their groups, and end the groups that then have
-- all they need.
-- KEYS  void, rollouts, open, groups, ended, ended_before, ledger, garbage, malformed, sizes,
--       group_hashes: group ..., (payloads: payload ...)
-- ARGV  consumer group, those of a policy (lib/complete), then for each entry: entry id, position of its group's hash in
--       the list, group id, index, kind, reward, bytes, payload key, role, reference JSON
-- Returns  {entries taken, outcome and data source of each group that has ended ...}
-- An entry that somebody else has finished (XACK 0) is skipped. A record that no slot waits for, or whose payload does
-- not exist, is removed as malformed.
-- include ended
-- include malformed
-- include sizes
-- include complete
-- include broken
local policy = policy_of(ARGV, 2)
local registered = 0  -- records that a slot waited for: those that the push script has counted

local function record_at(at)
  return {entry = ARGV[at], group_hash = keys.group_hashes[tonumber(ARGV[at + 1])], group_id = ARGV[at + 2], slot = ARGV[at + 3],
    kind = ARGV[at + 4], reward = ARGV[at + 5], bytes = ARGV[at + 6], payload = ARGV[at + 7], role = ARGV[at + 8],
    reference = ARGV[at + 9]}
end

local function refuse(record, problem)
  local detail = 'slot ' .. record.slot .. ' of group ' .. record.group_id .. ' ' .. problem
  note_malformed('rollouts', record.entry, detail, record.reference)
end

local function drop(record, reason)
  redis.pcall('HINCRBY', keys.ledger, 'dropped:' .. reason, 1)
  if record.bytes ~= '0' then redis.call('RPUSH', keys.garbage, record.payload .. ' ' .. record.bytes) end
end

-- A record whose group is not open.
local function take_late(record)
  local tombstone, key = find_ended(record.group_id)
  if tombstone then
    if slot_digit(tombstone, record.slot) ~= '2' then return refuse(record, 'waits for no record') end
    end_slot(key, record.group_id, tombstone, record.slot)
  end
  registered = registered + 1
  local late = tombstone and after_end(tombstone) or 'late'
  drop(record, record.kind == 'usable' and late or record.kind)
end

-- The reward of a record ('-' = it has none yet), and the reason for which its slot ends unused, if any.
local function judge(record, counts)
  if record.kind ~= 'usable' then return '-', record.kind end
  if is_complete(counts) then return '-', 'surplus' end  -- an earlier record of this call was the last one needed
  if record.reward ~= '' then return record.reward end
  local reward = redis.call('HGET', keys.group, 'score_value:' .. record.slot) or '-'
  return reward, reward == 'x' and 'unscorable' or nil
end

-- Fill the slots of an open group in order of arrival. Returns the outcome and the data source if the group has ended.
local function take_open(records, counts)
  local slots, waits, fields, overruled = {}, {}, {}, {}
  for i, record in ipairs(records) do slots[i] = record.slot end
  for i, text in ipairs(redis.call('HMGET', keys.group, unpack(slots))) do waits[slots[i]] = text == 'p' end
  local usable, unusable, unscored = counts.usable, counts.unusable, 0
  for _, record in ipairs(records) do
    if not waits[record.slot] then
      refuse(record, 'waits for no record')
    else
      waits[record.slot] = false
      local reward, unused_for = judge(record, counts)
      fields[#fields + 1] = record.slot
      if unused_for then
        fields[#fields + 1] = 'x'
        counts.unusable = counts.unusable + 1
        drop(record, unused_for)
      else
        fields[#fields + 1] = member_text(reward, record.bytes, record.payload, record.role, record.reference)
        if reward == '-' then unscored = unscored + 1 else counts.usable = counts.usable + 1 end
      end
      -- What came with the push stands, whatever `producer.score` says.
      if record.kind ~= 'usable' or record.reward ~= '' then overruled[#overruled + 1] = 'score:' .. record.slot end
    end
  end
  if #fields == 0 then return nil end
  registered = registered + #fields / 2
  usable, unusable = counts.usable - usable, counts.unusable - unusable
  redis.call('HSET', keys.group, unpack(fields))
  if #overruled > 0 then redis.call('HDEL', keys.group, unpack(overruled)) end
  if usable > 0 then redis.call('HINCRBY', keys.group, 'usable', usable) end
  if unscored > 0 then redis.call('HINCRBY', keys.group, 'unscored', unscored) end
  if unusable > 0 then redis.call('HINCRBY', keys.group, 'unusable', unusable) end
  if usable + unscored > 0 then redis.pcall('HINCRBY', keys.ledger, 'open', usable + unscored) end
  if is_complete(counts) then return complete(records[1].group_id, counts, policy) end
end

local acked, records, payloads = {}, {}, {}
for at = POLICY_ARGS + 2, #ARGV, 10 do
  if redis.call('XACK', keys.rollouts, ARGV[1], ARGV[at]) == 1 then
    local record = record_at(at)
    acked[#acked + 1], records[#records + 1] = record.entry, record
    if record.kind == 'usable' then payloads[#payloads + 1] = record.payload end
  end
end
if #acked == 0 then return {0} end
redis.call('XDEL', keys.rollouts, unpack(acked))

local groups, records_of = {}, {}  -- in order of arrival
local all_exist = #payloads == 0 or redis.call('EXISTS', unpack(payloads)) == #payloads
for _, record in ipairs(records) do
  if record.kind == 'usable' and not all_exist and redis.call('EXISTS', record.payload) == 0 then
    refuse(record, 'has no payload')
  else
    if not records_of[record.group_hash] then
      records_of[record.group_hash] = {}
      groups[#groups + 1] = records_of[record.group_hash]
    end
    table.insert(records_of[record.group_hash], record)
  end
end

local reply = {#acked}
for _, group_records in ipairs(groups) do
  keys.group = group_records[1].group_hash
  local state, counts = group_state()
  local outcome, data_source
  if state == 'open' then
    outcome, data_source = take_open(group_records, counts)
  else
    if state == 'broken' then outcome, data_source = end_broken(group_records[1].group_id, policy) end
    for _, record in ipairs(group_records) do take_late(record) end
  end
  if outcome then
    reply[#reply + 1] = outcome
    reply[#reply + 1] = data_source
  end
end
if registered > 0 then redis.pcall('HINCRBY', keys.ledger, 'rollouts', -registered) end
return reply
