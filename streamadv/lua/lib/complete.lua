-- How a group ends. A member is a field '<slot>' of the group's hash:
--   'p'   pushed, still in the rollouts stream or with a scorer
--   'x'   ended without a usable trajectory (failed, cancelled, unscorable ...); already counted as dropped
--   'u ...' usable: 'u <reward or -> <bytes> <payload key> <role> <reference JSON>'
-- The hash counts them as usable (with a reward), unscored (usable, no reward yet) and unusable ('x').
-- KEYS  group, open, groups, ended, ended_before, ledger, garbage, sizes
--   policy  partial_min_usable ('' = drop), zero_variance ('1' = filter), difficulty_low, difficulty_high
--           ('' = off), dedupe_groups
local MAX_SLOTS = 8192
local POLICY_ARGS = 5

-- The policy, from the argument `first` on: `policy_args` of run/manifest.py has the same order.
local function policy_of(args, first)
  return {partial_min_usable = args[first], zero_variance = args[first + 1], difficulty_low = args[first + 2],
    difficulty_high = args[first + 3], dedupe_groups = tonumber(args[first + 4])}
end

local function member_text(reward, bytes, key, role, reference)
  return 'u ' .. reward .. ' ' .. bytes .. ' ' .. key .. ' ' .. role .. ' ' .. reference
end

-- Returns reward, bytes, key, role and reference; nothing for what is no usable member.
local function member_fields(text)
  return string.match(text, '^u (%S+) (%S+) (%S+) (%S+) (.*)$')
end

local function whole(text)
  return text and #text <= 15 and string.match(text, '^%-?%d+$') and tonumber(text)
end

-- 'none', 'open' or 'broken' (somebody has overwritten the hash), and the counts of an open group.
local function group_state()
  local n = redis.pcall('HMGET', keys.group, 'size', 'slots', 'unfilled', 'slot_bytes', 'opened_ms', 'usable', 'unscored',
    'unusable')
  if n.err then return 'broken' end
  if not (n[1] or n[2] or n[3]) then return 'none' end
  for i = 1, 8 do
    if not whole(n[i] or (i > 5 and '0')) then return 'broken' end
  end
  local counts = {size = whole(n[1]), slots = whole(n[2]), usable = whole(n[6]) or 0, unusable = whole(n[8]) or 0}
  return counts.size > 0 and counts.slots <= MAX_SLOTS and 'open' or 'broken', counts
end

-- Whether a group of these counts ends: enough usable members are there, or nothing more can come.
local function is_complete(counts)
  return counts.usable >= counts.size or counts.usable + counts.unusable >= counts.slots
end

-- What a group short of usable members becomes.
local function short_outcome(usable, policy, otherwise)
  local minimum = tonumber(policy.partial_min_usable)
  if minimum and usable >= minimum then return 'partial' end
  return otherwise
end

-- Why a group with these rewards is not trained on, or nil.
local function filter_reason(rewards, policy)
  if #rewards == 0 then return 'no_train_members' end
  local low, high, sum = rewards[1], rewards[1], 0
  for _, reward in ipairs(rewards) do
    low, high, sum = math.min(low, reward), math.max(high, reward), sum + reward
  end
  if policy.zero_variance == '1' and low == high then return 'zero_variance' end
  local mean = sum / #rewards
  local easy, hard = tonumber(policy.difficulty_high), tonumber(policy.difficulty_low)
  if (easy and mean >= easy) or (hard and mean <= hard) then return 'difficulty' end
  return nil
end

-- The hash of a group: its fields, its usable members with (scored) and without a reward (unscored) in order of their
-- slots, the rewards of members to be trained on, and the bitmap of its tombstone.
local function read_members()
  local flat, group = redis.pcall('HGETALL', keys.group), {fields = {}, scored = {}, unscored = {}, rewards = {}}
  local slots = 0
  for i = 1, flat.err and 0 or #flat, 2 do
    group.fields[flat[i]] = flat[i + 1]
    if string.match(flat[i], '^%d%d?%d?%d?$') then slots = math.max(slots, tonumber(flat[i]) + 1) end
  end
  slots = math.min(whole(group.fields.slots) or slots, MAX_SLOTS)
  local bitmap = {}
  for slot = 0, slots - 1 do
    local text = group.fields[tostring(slot)]
    bitmap[slot + 1] = text and (text == 'p' and '2' or '1') or '0'
    local reward, bytes, key, role, reference = member_fields(text or '')
    if reward then
      local members = reward == '-' and group.unscored or group.scored
      members[#members + 1] = {slot = slot, bytes = bytes, key = key, reference = reference}
      if role == 'train' then group.rewards[#group.rewards + 1] = tonumber(reward) end
    end
  end
  group.bitmap = table.concat(bitmap)
  return group
end

-- Append the group to the groups log with its scored members.
local function log_group(id, group, outcome)
  local references, scores, payloads = {}, {}, {}
  for _, member in ipairs(group.scored) do
    references[#references + 1] = member.reference
    payloads[#payloads + 1] = member.key .. ' ' .. member.bytes
    local score = group.fields['score:' .. member.slot]
    if score then scores[#scores + 1] = '"' .. member.slot .. '":' .. score end
  end
  redis.call('XADD', keys.groups, '*', 'group_id', id, 'size', group.fields.size,
    'data_source', group.fields.data_source or '', 'opened_ms', group.fields.opened_ms, 'outcome', outcome,
    'epoch', group.fields.epoch or '0', 'version', group.fields.version or '',
    'count', #group.scored, 'members', '[' .. table.concat(references, ',') .. ']',
    'scores', '{' .. table.concat(scores, ',') .. '}', 'payloads', table.concat(payloads, '\n'))
  redis.pcall('HINCRBY', keys.ledger, 'grouped', #group.scored)
  redis.pcall('HINCRBY', keys.ledger, 'groups_logged', 1)
end

-- Count members under a reason, and have their payloads deleted.
local function drop_members(members, reason)
  if #members > 0 then redis.pcall('HINCRBY', keys.ledger, reason, #members) end
  for _, member in ipairs(members) do redis.call('RPUSH', keys.garbage, member.key .. ' ' .. member.bytes) end
end

-- Give back what an open group holds beside its members.
local function give_back(fields)
  local unfilled = whole(fields.unfilled) or 0
  if unfilled > 0 and whole(fields.slot_bytes) then reserve(keys.sizes, fields.slot_bytes, -unfilled) end
  if fields.abandoned == '1' then redis.pcall('HINCRBY', keys.ledger, 'groups_abandoned', -1) end
end

-- Put a tombstone in the place of the open group.
local function close_group(id, group, letter, policy)
  redis.call('ZREM', keys.open, id)
  redis.call('DEL', keys.group)
  redis.pcall('HINCRBY', keys.ledger, 'groups_open', -1)
  give_back(group.fields)
  local members = #group.scored + #group.unscored
  if members > 0 then redis.pcall('HINCRBY', keys.ledger, 'open', -members) end
  remember_ended(id, letter, group.bitmap, policy.dedupe_groups)
end

-- End the group for `outcome`. 'complete' and 'partial' go to the groups log unless a filter drops them; any other outcome
-- drops the members under its name. `letter` is the first one of the tombstone. Returns the outcome counted and the
-- group's data source.
local function end_group(id, outcome, letter, policy)
  local group = read_members()
  if outcome == 'complete' or outcome == 'partial' then outcome = filter_reason(group.rewards, policy) or outcome end
  if outcome == 'complete' or outcome == 'partial' then
    log_group(id, group, outcome)
    drop_members(group.unscored, 'dropped:surplus')
  else
    local reason = (outcome == 'malformed' and 'dead:' or 'dropped:') .. outcome
    drop_members(group.scored, reason)
    drop_members(group.unscored, reason)
  end
  close_group(id, group, letter, policy)
  redis.pcall('HINCRBY', keys.ledger, 'outcome:' .. outcome, 1)
  return outcome, group.fields.data_source or ''
end

-- End a group that is complete. Returns what end_group returns.
local function complete(id, counts, policy)
  local outcome = counts.usable >= counts.size and 'complete' or short_outcome(counts.usable, policy, 'incomplete')
  return end_group(id, outcome, 'c', policy)
end
