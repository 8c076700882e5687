-- How a group ends. A member is a field '<index>' of the group's hash:
--   'p'   pushed, still in the rollouts stream or with a scorer
--   'x'   ended without a usable trajectory (failed, cancelled, unscorable ...); already counted as dropped
--   'u ...' usable: 'u <reward or -> <bytes> <payload key> <role> <reference JSON>'
-- The hash counts them as usable (with a reward), unscored (usable, no reward yet) and unusable ('x').
--   keys    group, open, groups, ended, ended_before, ledger, garbage, sizes
--   policy  partial_min_usable ('' = drop), zero_variance ('1' = filter), difficulty_low, difficulty_high
--           ('' = off), dedupe_groups

local function member_fields(text)
  return string.match(text, '^u (%S+) (%S+) (%S+) (%S+) (.*)$')
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

-- 'none', 'open' or 'broken' (what stands there is not what the scripts wrote), and the counts of an open group.
local function group_state(keys)
  local n = redis.pcall('HMGET', keys.group, 'size', 'slots', 'unfilled', 'slot_bytes', 'opened_ms', 'usable', 'unscored',
    'unusable')
  if n.err then return 'broken' end
  if not (n[1] or n[2] or n[3]) then return 'none' end
  for i = 1, 8 do
    if not string.match(n[i] or (i > 5 and '0' or ''), '^%-?%d+$') or #(n[i] or '') > 15 then return 'broken' end
  end
  local counts = {size = tonumber(n[1]), slots = tonumber(n[2]), usable = tonumber(n[6] or '') or 0,
    unusable = tonumber(n[8] or '') or 0}
  return counts.size > 0 and counts.slots <= 8192 and 'open' or 'broken', counts
end

-- What an open group holds beside its members, when it ends.
local function give_back(keys, group)
  local unfilled = tonumber(group.unfilled)
  if unfilled > 0 then reserve(keys.sizes, group.slot_bytes, -unfilled) end
  if group.abandoned == '1' then redis.pcall('HINCRBY', keys.ledger, 'groups_abandoned', -1) end
end

-- End the group for `outcome`: 'complete' and 'partial' go on to the groups log unless filtered, anything else
-- is dropped under that name. `letter` is what the tombstone says of it. Returns the outcome
-- counted and the group's data source.
local function end_group(keys, id, outcome, letter, policy)
  local flat = redis.call('HGETALL', keys.group)
  local group = {}
  for i = 1, #flat, 2 do group[flat[i]] = flat[i + 1] end
  local slots, bitmap = tonumber(group.slots), {}
  local kept, rewards, left_out = {}, {}, {}
  for index = 0, slots - 1 do
    local text = group[tostring(index)]
    bitmap[#bitmap + 1] = text and (text == 'p' and '2' or '1') or '0'
    local reward, bytes, key, role, reference = member_fields(text or '')
    local number = tonumber(reward or '')
    if reference and (reward == '-' or (number and number == number)) then
      if reward == '-' then
        left_out[#left_out + 1] = {key = key, bytes = bytes}
      else
        kept[#kept + 1] = {key = key, bytes = bytes, reference = reference, index = index}
        if role == 'train' then rewards[#rewards + 1] = tonumber(reward) end
      end
    end
  end
  local drop_reason = 'surplus'
  if outcome == 'complete' or outcome == 'partial' then
    outcome = filter_reason(rewards, policy) or outcome
  end
  -- Both differ only where somebody else wrote into the hash: such members are lost, or arrive now.
  local n_open = (tonumber(group.usable) or 0) + (tonumber(group.unscored) or 0)
  local lost = n_open - #kept - #left_out
  if lost > 0 then redis.pcall('HINCRBY', keys.ledger, 'dead:malformed', lost) end
  if lost < 0 then redis.pcall('HINCRBY', keys.ledger, 'pushed', -lost) end
  redis.call('ZREM', keys.open, id)
  redis.call('DEL', keys.group)
  redis.pcall('HINCRBY', keys.ledger, 'groups_open', -1)
  give_back(keys, group)
  if n_open > 0 then redis.pcall('HINCRBY', keys.ledger, 'open', -n_open) end
  if outcome == 'complete' or outcome == 'partial' then
    local references, scores, payloads = {}, {}, {}
    for _, member in ipairs(kept) do
      references[#references + 1] = member.reference
      payloads[#payloads + 1] = member.key .. ' ' .. member.bytes
      local score = group['score:' .. member.index]
      if score then scores[#scores + 1] = '"' .. member.index .. '":' .. score end
    end
    redis.call('XADD', keys.groups, '*', 'group_id', id, 'size', group.size, 'data_source', group.data_source or '',
      'opened_ms', group.opened_ms, 'outcome', outcome, 'epoch', group.epoch or '0', 'version', group.version or '',
      'count', #kept, 'members', '[' .. table.concat(references, ',') .. ']',
      'scores', '{' .. table.concat(scores, ',') .. '}', 'payloads', table.concat(payloads, '\n'))
    redis.pcall('HINCRBY', keys.ledger, 'grouped', #kept)
    redis.pcall('HINCRBY', keys.ledger, 'groups_logged', 1)
  else
    for _, member in ipairs(kept) do left_out[#left_out + 1] = member end
    drop_reason = outcome
  end
  if #left_out > 0 then
    redis.pcall('HINCRBY', keys.ledger, 'dropped:' .. drop_reason, #left_out)
    for _, member in ipairs(left_out) do
      redis.call('RPUSH', keys.garbage, member.key .. ' ' .. member.bytes)
    end
  end
  redis.pcall('HINCRBY', keys.ledger, 'outcome:' .. outcome, 1)
  remember_ended(keys, id, letter, table.concat(bitmap), policy.dedupe_groups)
  return outcome, group.data_source or ''
end

-- What a group short of usable members becomes.
local function short_outcome(usable, policy, otherwise)
  local minimum = tonumber(policy.partial_min_usable)
  if minimum and usable >= minimum then return 'partial' end
  return otherwise
end

-- Whether a group of these counts ends: enough usable members are there, or nothing more can come.
local function is_complete(counts)
  return counts.usable >= counts.size or counts.usable + counts.unusable >= counts.slots
end

-- End a group that is complete. Returns what end_group returns.
local function complete(keys, id, counts, policy)
  local outcome = counts.usable >= counts.size and 'complete' or short_outcome(counts.usable, policy, 'incomplete')
  return end_group(keys, id, outcome, 'c', policy)
end
